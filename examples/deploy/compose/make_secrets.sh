#!/usr/bin/env bash
# Make the keys of the store and the token of the replicas, in secrets/; what is there stays.
set -euo pipefail
umask 077
mkdir -p "${1:-secrets}"
cd "${1:-secrets}"

word() { head -c 24 /dev/urandom | base64 | tr -d '+/='; }

if [[ ! -e aws ]]; then
  key=$(word)
  secret=$(word)
  printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$key" "$secret" >aws
  printf '{"identities": [{"name": "deltachain", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}\n' \
    "$key" "$secret" >s3.json
fi
[[ -e token ]] || word >token
chmod 644 aws s3.json token # the containers' user reads them; the folder is yours alone
