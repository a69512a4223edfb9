"""The scripts that ``completion`` prints, by shell; each calls ``hpc-train complete`` on a Tab."""

from __future__ import annotations

_BASH = r"""# hpc-train: completion for bash. Load it in ~/.bashrc: eval "$(hpc-train completion bash)"
_hpc_train() {
    local how="" candidate program="${COMP_WORDS[0]/#\~/$HOME}"
    COMPREPLY=()
    {
        IFS= read -r how
        while IFS= read -r candidate; do COMPREPLY+=("$candidate"); done
    } < <("$program" complete "${COMP_LINE:0:COMP_POINT}" --breaks "$COMP_WORDBREAKS" 2>/dev/null)
    case "$how" in
        files | folders) compopt -o filenames 2>/dev/null ;;
        open) compopt -o nospace 2>/dev/null ;;
    esac
}
complete -F _hpc_train hpc-train
"""
_ZSH = r"""#compdef hpc-train
# hpc-train: completion for zsh. Load it in ~/.zshrc, after compinit: eval "$(hpc-train completion zsh)"
_hpc_train() {
    local how
    local -a lines
    lines=("${(@f)$(${~words[1]} complete "${(j: :)${(@q)words[1,CURRENT]}}" 2>/dev/null)}")
    how="${lines[1]}"
    lines=("${(@)lines[2,-1]}")
    (( $#lines )) || return 1
    case "$how" in
        files) compadd -f -- "${lines[@]}" ;;
        folders) compadd -f -S '' -- "${lines[@]}" ;;
        open) compadd -S '' -- "${lines[@]}" ;;
        *) compadd -- "${lines[@]}" ;;
    esac
}
compdef _hpc_train hpc-train
"""
_FISH = r"""# hpc-train: completion for fish. Write it to ~/.config/fish/completions/hpc-train.fish
complete -c hpc-train -f -a '(hpc-train complete (commandline -cp | string collect) 2>/dev/null | tail -n +2)'
"""
#: Shell → its script.
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
