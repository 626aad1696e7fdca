#!/usr/bin/env bash
# Serves a stock vLLM or SGLang that follows the chain at DELTACHAIN_URL; README.md has the variables.
#
# The checkpoint that it loads is brought to the head of the chain first. So a Space that was
# started again, or has slept, is where the chain is, whatever its folder held.
set -euo pipefail
exec </dev/null # nobody is there to be asked

refuse() { # message, hint
  printf 'error  %s\nhint   %s\n' "$1" "$2" >&2
  exit 2
}

say() { printf 'entrypoint  %s\n' "$1" >&2; }

engine=${ENGINE:-}
case $engine in
  vllm) command -v vllm >/dev/null ;;
  sglang) python3 -c 'import sys, importlib.util as u; sys.exit(u.find_spec("sglang") is None)' ;;
  *) refuse "ENGINE is '$engine'" "vllm or sglang" ;;
esac || refuse "this image has no $engine" "ENGINE also decides what is built: rebuild the Space"
[[ ${DELTACHAIN_URL:-} ]] ||
  refuse "DELTACHAIN_URL is not set" "the chain to follow, such as hf://buckets/me/policy/run-1 or s3://bucket/run-1"
[[ ${DELTACHAIN_TOKEN:-}${DELTACHAIN_TOKEN_FILE:-} ]] ||
  refuse "DELTACHAIN_TOKEN is not set" "a secret, here or in DELTACHAIN_TOKEN_FILE, for those who may say which version is served"
[[ $DELTACHAIN_URL != hf://* || ${HF_TOKEN:-} ]] ||
  say "HF_TOKEN is not set: only a public bucket can be read"
wait_s=${WAIT_S:-3000}
[[ $wait_s =~ ^[0-9]+$ ]] || refuse "WAIT_S is '$wait_s', not whole seconds" "such as 3000"
[[ ${PORT:=7860} =~ ^[0-9]+$ ]] || refuse "PORT is '$PORT', not a number" "such as 7860"

# xargs splits at blanks but for quotes, and runs nothing, which eval would.
words=$(xargs -r -n 1 printf '%s\n' <<<"${ENGINE_ARGS:-}") ||
  refuse "ENGINE_ARGS cannot be split into words" "close every quote: ${ENGINE_ARGS:-}"
engine_args=()
[[ -z $words ]] || mapfile -t engine_args <<<"$words"

# Process 1 gets no signal that it does not trap, and a trap waits for what runs in front.
child=
end() {
  trap - TERM INT
  [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true
  wait || true
  exit "$1"
}
trap 'end 143' TERM
trap 'end 130' INT

run() {
  local code=0
  "$@" &
  child=$!
  wait "$child" || code=$?
  child=
  return "$code"
}

policy=${POLICY_DIR:-$HOME/policy}
mkdir -p "$policy" 2>/dev/null && [[ -w $policy ]] ||
  refuse "$policy cannot be written to by user $(id -u)" "give another folder in POLICY_DIR"

base=()
if [[ ${MODEL:-} ]]; then
  if [[ ! -d $MODEL ]]; then
    say "fetching $MODEL, which the chain may begin with"
    run hf download "$MODEL" --revision "${MODEL_REVISION:-main}" --local-dir "$HOME/base" --quiet
    MODEL=$HOME/base
  fi
  base=(--base "$MODEL")
  export DELTACHAIN_BASE=$MODEL
fi

# What is not there yet is waited for. A folder that holds another chain, or what nobody can use, is
# filled anew once: it is a copy. One that deltachain has not filled is left alone.
refilled=
until
  code=0
  run deltachain pull "$DELTACHAIN_URL" --out "$policy" "${base[@]}" || code=$?
  ((code == 0))
do
  if ((code >= 4 && code <= 6)) && [[ -e $policy/deltachain.json && ! $refilled ]]; then
    refilled=1
    say "filling $policy anew"
    find "$policy" -mindepth 1 -delete
  elif ((code != 3 && code != 4)); then
    exit "$code"
  elif ((SECONDS >= wait_s)); then
    say "nothing to serve after $wait_s s"
    exit "$code"
  else
    run sleep "${RETRY_S:-10}"
  fi
done

export DELTACHAIN_FOLLOW=1

serve_vllm() {
  # The key is not in its arguments, where its log and other processes would show it.
  [[ -z ${API_KEY:-} ]] || export VLLM_API_KEY=$API_KEY
  export VLLM_PLUGINS=${VLLM_PLUGINS:+$VLLM_PLUGINS,}deltachain,deltachain_http
  exec vllm serve "$policy" "$@" \
    --worker-extension-cls deltachain_vllm.WorkerExtension \
    --weight-transfer-config '{"backend": "deltachain"}' \
    "${engine_args[@]}"
}

serve_sglang() {
  # An admin key of its own would guard nothing: /server_info shows it to whoever may ask.
  # The key is in a file that only this user can read: other processes see arguments.
  local key=()
  if [[ ${API_KEY:-} ]]; then
    [[ " ${engine_args[*]-}" != *" --config"* ]] ||
      refuse "API_KEY is set, and ENGINE_ARGS has --config" "write api-key into that file, and unset API_KEY"
    [[ $API_KEY != *$'\n'* ]] || refuse "API_KEY has several lines" "give one key"
    local config
    config=$(umask 077 && mktemp --suffix .yaml)
    printf "api-key: '%s'\n" "${API_KEY//\'/\'\'}" >"$config"
    key=(--config "$config")
  else
    say "API_KEY is not set: who reaches this server may write its weights; keep the Space private"
  fi
  [[ -z ${SGLANG_PLUGINS:-} ]] || export SGLANG_PLUGINS=$SGLANG_PLUGINS,deltachain
  exec python3 -m sglang.launch_server --model-path "$policy" "$@" "${key[@]}" "${engine_args[@]}"
}

"serve_$engine" --host "${HOST:-0.0.0.0}" --port "$PORT" --served-model-name "${MODEL_NAME:-policy}"
