# offered.zsh DIR LINE: what zsh offers behind LINE with the completions of DIR, one a line. Completion is a part of its line
# editor, so another zsh has a terminal here.
zmodload zsh/zpty || exit 1
zpty shell zsh -f -i
# compadd is what all completions end with: it tells what would fit, and -O, -A and -D only ask it.
zpty -w shell "unsetopt zle_bracketed_paste beep; PROMPT= RPROMPT= PS2=; stty -echo; fpath=(${(q)1} \$fpath); autoload -Uz compinit
compadd() { local -a fits; builtin compadd \"\$@\"; local -i status_=\$?
  [[ -n \${argv[(r)-[OAD]]} ]] || { builtin compadd -O fits \"\$@\"; print -rl -- '' OFFERED:\$^fits; }; return status_ }
told() { print; print -r -- END-OF-OFFERS; }; zle -N told; LISTMAX=10000
compinit -u -D; bindkey '^I' complete-word; bindkey '^E' told; print BEG''INS"
zpty -r -m shell line '*BEGINS*' || exit 1
zpty -w -n shell "$2"$'\t\x05'
zpty -r -m shell offers '*END-OF-OFFERS*' || exit 1
zpty -d shell
offers=${offers//$'\r'/}
for offer in ${(f)offers}; do
  [[ $offer != *OFFERED:* ]] || print -r -- "${offer##*OFFERED:}"
done
