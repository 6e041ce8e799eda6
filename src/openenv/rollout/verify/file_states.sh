# file_states.sh PATH...: print inode, change date, kind and name of each PATH, a line `--`, then hashes of the files.
stat -c '%i %z %F %n' -- "$@" 2> /dev/null
echo --
count=$#
for path do
  # The files are appended to the arguments; `shift` then drops the original ones.
  if [ -f "$path" ] && [ ! -L "$path" ]; then set -- "$@" "$path"; fi
done
shift "$count"
[ $# = 0 ] || exec sha256sum -- "$@"
