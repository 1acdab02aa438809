#!/usr/bin/env bash
# SMG in front of two workers on other machines; see README.md beside this file.
# WORKER_A, WORKER_B: their tcp:// addresses. KEYS: a directory with gateway.key_secret, a.key and b.key.
# Arguments are further options of `smg launch`.
set -euo pipefail

: "${WORKER_A:?give the address of the first worker, tcp://HOST:PORT}"
: "${WORKER_B:?give the address of the second worker, tcp://HOST:PORT}"
: "${KEYS:?give the directory of the keys}"
MODEL=${MODEL:-model}
PORT=${PORT:-30000}
HOST=${HOST:-127.0.0.1}
STATE=${STATE:-${XDG_RUNTIME_DIR:-/tmp}/zmqengine-smg-$(id -u)}

(umask 077 && mkdir -p "$STATE")
rm -rf "${STATE:?}/$MODEL"

children=()
# shellcheck disable=SC2317 # The trap calls it.
end() {
  trap - EXIT
  [ ${#children[@]} -eq 0 ] || kill -TERM "${children[@]}" 2>/dev/null || true
  wait
}
trap end EXIT
trap 'exit 0' INT TERM

adapter() { # NAME ADDRESS
  zmqengine smg --worker "$2" --client-key "$KEYS/gateway.key_secret" --server-key "$KEYS/$1.key" \
    --engine "ipc://$STATE/$1" --tokenizer-dir "$STATE/$MODEL" &
  children+=($!)
}

adapter a "$WORKER_A"
adapter b "$WORKER_B"

# The adapters write the tokenizer when their worker is ready; config.json comes last.
until [ -e "$STATE/$MODEL/config.json" ]; do
  kill -0 "${children[@]}" 2>/dev/null || exit 1
  sleep 0.2
done

# The gateway waits for a ZeroMQ engine from its first health check on, and now and then that check comes one interval
# after the start: a minute by default. Its metrics would be open to all addresses.
smg launch --backend vllm --worker-urls "ipc://$STATE/a" "ipc://$STATE/b" --model-path "$STATE/$MODEL" \
  --host "$HOST" --port "$PORT" --prometheus-host "$HOST" --policy cache_aware --health-check-interval-secs 5 "$@" &
children+=($!)

# The first that ends takes the others along.
wait -n
