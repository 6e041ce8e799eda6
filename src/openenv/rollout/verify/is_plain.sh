# is_plain.sh FOLDER PATH: succeed if PATH below FOLDER is a writable file and no part of PATH is a link.
cd -- "$1" || exit 1
path=$2
if [ ! -f "$path" ] || [ ! -w "$path" ]; then exit 1; fi
while [ "$path" != . ]; do
  if [ -L "$path" ]; then exit 1; fi
  path=$(dirname -- "$path")
done
