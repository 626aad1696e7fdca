#!/usr/bin/env bash
# Installs the wheel beside this file into an image that has an engine: bash install.sh EXTRAS
#
# Packages of the image stay at their versions, since the engine was built with them: where deltachain
# needs another one, this fails. constraints.txt has the versions of those that the image lacks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

wheels=(deltachain-*.whl)
if [[ ${#wheels[@]} != 1 || ! -f ${wheels[0]} ]]; then
  printf 'error  there must be one wheel here, not: %s\n' "${wheels[*]}" >&2
  printf 'hint   rm -f *.whl && pip wheel ROOT_OF_DELTACHAIN --no-deps --wheel-dir .\n' >&2
  exit 2
fi

constraints=$(mktemp)
# Names are equal whatever their case, and whether they have "_", "-" or ".".
python3 -m pip list --format=freeze | awk -F== '
  function plain(name) { gsub(/[-_.]+/, "-", name); return tolower(name) }
  /^#/ { next }
  FNR == NR { version[plain($1)] = $2; next }
  plain($1) in version { version[plain($1)] = $2 }
  END { for (name in version) print name "==" version[name] }
' constraints.txt - >"$constraints"
python3 -m pip install --no-cache-dir --break-system-packages \
  --constraint "$constraints" "${wheels[0]}[$1]"
rm "$constraints"
