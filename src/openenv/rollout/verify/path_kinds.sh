# path_kinds.sh FOLDER PATH...: print one letter per PATH below FOLDER.
# f: a file, d: a folder, -: anything else. A link anywhere on the path makes it `-`: it may lead out of FOLDER.
cd -- "$1" || exit 1
shift
for path in "$@"; do
  kind=- here=
  if [ -f "$path" ]; then kind=f; elif [ -d "$path" ]; then kind=d; fi
  rest=$path
  while [ -n "$rest" ]; do
    part=${rest%%/*}
    case $rest in */*) rest=${rest#*/};; *) rest=;; esac
    here=$here$part
    if [ -L "$here" ]; then kind=-; fi
    here=$here/
  done
  printf %s "$kind"
done
