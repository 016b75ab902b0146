"""The command that prints completions for a shell: `completion`.

The script is made from the parsers of all commands, which `cli` hands over, so that it knows
every option.  What only the file knows (types, ids) it asks for by running this command again;
such names may hold anything, so the scripts never let the shell evaluate them.
"""

from __future__ import annotations

import shlex
import sys

from .common import EXIT_DONE, OneOf, Usage, add_database, emit, one_of, open_queue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Action, ArgumentParser, Namespace
    from collections.abc import Iterator, Mapping

    from .common import Command

    Commands = Mapping[str, tuple[str, ArgumentParser]]
    """name -> (summary, parser)"""

SHELLS = ("bash", "zsh", "fish")
FILE, TYPE, ID, WORDS, ANY = "file", "type", "id", "words", "any"
"""What an option or argument takes."""

_COMPLETION = """\
Print a script that completes commands, options, statuses, and the types and ids
of jobs, as you type. It asks this program for types and ids, in the file that
--database on the line names, or else JOBQUEUE_DATABASE.

examples:
  source <(python -m jobqueue completion bash)           in ~/.bashrc
  python -m jobqueue completion zsh > ~/.zfunc/_jobqueue     a directory in $fpath
  python -m jobqueue completion fish > ~/.config/fish/completions/jobqueue.fish

It completes the command "jobqueue", as pip installs it, or as an alias makes it:
  alias jobqueue='python -m jobqueue'
and in bash "python -m jobqueue" as well, after
  complete -o default -F _jobqueue python python3
"""


def _add_options(parser: ArgumentParser) -> None:
    parser.usage = f"{parser.prog} {'|'.join(SHELLS)}"
    parser.add_argument("shell", metavar="SHELL", nargs="?", type=one_of(SHELLS, "shell"),
                        help=f"for which shell: {', '.join(SHELLS)}")
    parser.add_argument("--types", action="store_true", help="print the types of the jobs in the file instead")
    parser.add_argument("--ids", action="store_true", help="print the ids of the newest jobs instead")
    add_database(parser)


def _completion(options: Namespace) -> int:
    if options.types or options.ids:
        with open_queue(options) as queue:
            emit(queue.types() if options.types else queue.newest_ids())
        return EXIT_DONE
    if options.shell is None:
        raise Usage(f"name the shell, one of {', '.join(SHELLS)}")
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]
    emit([script(options.commands).rstrip()])
    return EXIT_DONE


# -- what there is to complete -----------------------------------------------------------

def _kind(command: str, action: Action) -> tuple[str, tuple[str, ...]]:
    """Return what an option or argument takes, and the words if it is some of those."""
    if isinstance(action.type, OneOf):
        return WORDS, action.type.words
    if action.choices is not None:
        return WORDS, tuple(map(str, action.choices))
    if action.metavar in ("PATH", "FILE", "MODULE"):
        return FILE, ()
    if action.metavar == "TYPE":
        return TYPE, ()
    if action.metavar == "ID" and action.dest != "trace" and (command, action.dest) != ("enqueue", "id"):
        return ID, ()
    return ANY, ()


def _options(parser: ArgumentParser) -> Iterator[Action]:
    return (action for action in parser._actions if action.option_strings)


def _argument(command: str, parser: ArgumentParser) -> tuple[str, tuple[str, ...]]:
    """Return what stands behind a command without an option before it."""
    for action in parser._actions:
        if not action.option_strings:
            return _kind(command, action)
    return ANY, ()


def _cases(commands: Commands, indent: str) -> str:
    """Return the branches of a shell's `case "$command $option"` that set `kind` and `offered`."""
    lines = []
    for name, (_, parser) in commands.items():
        for action in _options(parser):
            if action.nargs == 0:
                continue
            kind, words = _kind(name, action)
            patterns = "|".join(f"'{name} {option}'" for option in action.option_strings)
            lines.append(f"{patterns}) kind={kind} offered={shlex.quote(' '.join(words))} ;;")
    return f"\n{indent}".join(lines)


def _fallbacks(commands: Commands, indent: str) -> str:
    """Return the branches of a `case "$command"` for what follows no option."""
    lines = []
    for name, (_, parser) in commands.items():
        names = " ".join(option for action in _options(parser) for option in action.option_strings)
        kind, words = _argument(name, parser)
        lines.append(f"{name}) options={shlex.quote(names)} kind={kind} offered={shlex.quote(' '.join(words))} ;;")
    return f"\n{indent}".join(lines)


def _program() -> str:
    """Return the words that run this program, for a shell."""
    return f"{shlex.quote(sys.executable or 'python3')} -m {__package__.partition('.')[0]}"


# -- bash --------------------------------------------------------------------------------

_BASH = r"""
# Completion of jobqueue for bash; use it by: source <(jobqueue completion bash)

_jobqueue_offer() {  # takes lines from stdin: each that begins like the word, quoted, never evaluated
    local name
    while IFS= read -r name; do
        [[ -n $name && $name == "$word"* ]] && COMPREPLY+=("$(printf %q "$name")")
    done
}

_jobqueue_ask() {  # --types or --ids of the file that the line names
    local n database=
    for ((n = 0; n < ${#words[@]}; n++)); do
        case ${words[n]} in
            --database) database=${words[n + 1]} ;;
            --database=*) database=${words[n]#--database=} ;;
        esac
    done
    database=${database//[\"\'\\]/}
    [[ $database == '~/'* ]] && database=$HOME/${database#'~/'}
    @PROGRAM@ completion "$1" ${database:+--database "$database"} 2>/dev/null </dev/null
}

_jobqueue() {
    local line=${COMP_LINE:0:COMP_POINT} first=1 command option word words kind= offered= options= split name
    word=${line##*[[:space:]]}
    read -r -a words <<< "${line%"$word"}"
    if [[ ${words[1]} == -m && ${words[2]} == jobqueue ]]; then
        first=3
    elif [[ ${words[0]##*/} == python* ]]; then
        return 0
    fi
    COMPREPLY=()
    if ((${#words[@]} <= first)); then
        _jobqueue_offer <<< '@COMMANDS@'
        return 0
    fi
    command=${words[first]}
    option=${words[${#words[@]} - 1]}
    if [[ $word == --*=* ]]; then
        option=${word%%=*}
        word=${word#*=}
    fi
    case "$command $option" in
        @CASES@
        *)
            case $command in
                @FALLBACKS@
            esac
            if [[ $word == -* ]]; then
                kind=words offered=$options
            fi ;;
    esac
    case $kind in
        words) _jobqueue_offer <<< "${offered// /$'\n'}" ;;
        type) _jobqueue_offer < <(_jobqueue_ask --types) ;;
        id) _jobqueue_offer < <(_jobqueue_ask --ids) ;;
        file)
            compopt -o filenames 2>/dev/null
            while IFS= read -r name; do COMPREPLY+=("$name"); done < <(compgen -f -- "$word") ;;
    esac
    # Readline replaces only what follows the last of these.
    if [[ $word == *:* && $COMP_WORDBREAKS == *:* ]]; then
        split=$(printf %q "${word%"${word##*:}"}")
        COMPREPLY=("${COMPREPLY[@]#"$split"}")
    fi
}

complete -F _jobqueue jobqueue
"""


def _bash(commands: Commands) -> str:
    return (_BASH.lstrip().replace("@PROGRAM@", _program())
            .replace("@COMMANDS@", "\n".join((*commands, "--help", "--version")))
            .replace("@CASES@", _cases(commands, " " * 8)).replace("@FALLBACKS@", _fallbacks(commands, " " * 16)))


# -- zsh ---------------------------------------------------------------------------------

_ZSH = r"""
#compdef jobqueue
# Completion of jobqueue for zsh; put it into a file _jobqueue in a directory of $fpath.

_jobqueue_ask() {
    local n database=
    for ((n = 1; n < CURRENT; n++)); do
        case ${words[n]} in
            --database) database=${(Q)words[n + 1]} ;;
            --database=*) database=${(Q)words[n]#--database=} ;;
        esac
    done
    [[ $database == '~/'* ]] && database=$HOME/${database#'~/'}
    @PROGRAM@ completion $1 ${database:+--database} ${database:+$database} 2>/dev/null </dev/null
}

_jobqueue() {
    local command=${words[2]} option=${words[CURRENT - 1]} kind= offered= options=
    local -a names
    if ((CURRENT == 2)); then
        names=(@DESCRIBED@)
        _describe command names
        return
    fi
    if [[ $PREFIX == --*=* ]]; then
        option=${PREFIX%%=*}
        compset -P '*='
    fi
    case "$command $option" in
        @CASES@
        *)
            case $command in
                @FALLBACKS@
            esac
            if [[ $PREFIX == -* ]]; then
                kind=words offered=$options
            fi ;;
    esac
    case $kind in
        words) names=(${=offered}) ;;
        type) names=("${(@f)$(_jobqueue_ask --types)}") ;;
        id) names=("${(@f)$(_jobqueue_ask --ids)}") ;;
        file) _files; return ;;
    esac
    compadd -- $names
}

if [[ $funcstack[1] == _jobqueue ]]; then
    _jobqueue "$@"
else
    compdef _jobqueue jobqueue
fi
"""


def _zsh(commands: Commands) -> str:
    described = " ".join(shlex.quote(f"{name}:{summary}") for name, (summary, _) in commands.items())
    return (_ZSH.lstrip().replace("@PROGRAM@", _program()).replace("@DESCRIBED@", described)
            .replace("@CASES@", _cases(commands, " " * 8)).replace("@FALLBACKS@", _fallbacks(commands, " " * 16)))


# -- fish --------------------------------------------------------------------------------

_FISH = r"""
# Completion of jobqueue for fish; put it into ~/.config/fish/completions/jobqueue.fish.

function __jobqueue_ask
    set -l database
    set -l words (commandline -opc)
    for n in (seq (count $words))
        if test "$words[$n]" = --database; and test $n -lt (count $words)
            set database --database $words[(math $n + 1)]
        else if string match -q -- '--database=*' $words[$n]
            set database $words[$n]
        end
    end
    @PROGRAM@ completion $argv[1] $database 2>/dev/null </dev/null
end

complete -c jobqueue -f
"""
_FISH_TAKES = {
    FILE: "-r -F",
    TYPE: "-x -a '(__jobqueue_ask --types)'",
    ID: "-x -a '(__jobqueue_ask --ids)'",
    ANY: "-x",
}


def _fish(commands: Commands) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = []
    for name, (summary, parser) in commands.items():
        lines.append(f"complete -c jobqueue -n __fish_use_subcommand -a {name} -d {quoted(summary)}")
        seen = f"complete -c jobqueue -n '__fish_seen_subcommand_from {name}'"
        kind, words = _argument(name, parser)
        if kind != ANY:
            takes = f"-a {quoted(' '.join(words))}" if kind == WORDS else _FISH_TAKES[kind].replace("-r ", "")
            lines.append(f"{seen} {takes.replace('-x ', '')}")
        for action in _options(parser):
            flags = " ".join(f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
                             for option in action.option_strings)
            kind, words = _kind(name, action)
            takes = "" if action.nargs == 0 else f"-x -a {quoted(' '.join(words))} " if kind == WORDS else (
                _FISH_TAKES[kind] + " ")
            lines.append(f"{seen} {flags} {takes}-d {quoted(action.help or '')}")
    return _FISH.lstrip().replace("@PROGRAM@", _program()) + "\n".join(lines)


COMMANDS: dict[str, Command] = {"completion": (_COMPLETION, _add_options, _completion)}
