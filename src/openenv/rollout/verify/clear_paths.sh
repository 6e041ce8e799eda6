# clear_paths.sh FOLDER... -- PATH...: make room for the verifier's files in a tree that the agent wrote.
# A link or an odd file in place of a FOLDER is removed; whatever lies at a PATH is removed.
while [ "$1" != -- ]; do
  if [ -L "$1" ] || { [ -e "$1" ] && [ ! -d "$1" ]; }; then rm -f -- "$1" || exit 1; fi
  shift
done
shift
for file in "$@"; do rm -rf -- "$file" || exit 1; done
