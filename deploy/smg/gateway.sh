#!/usr/bin/env bash
# SMG in front of two workers on other machines; see README.md beside this file.
# WORKER_A, WORKER_B: their tcp:// addresses. KEYS: a directory with gateway.key_secret, a.key and b.key.
# Arguments are further options of `smg launch`.
set -euo pipefail

: "${WORKER_A:?give the address of the first worker, tcp://HOST:PORT}"
: "${WORKER_B:?give the address of the second worker, tcp://HOST:PORT}"
: "${KEYS:?give the directory of the keys}"
PORT=${PORT:-30000}
HOST=${HOST:-127.0.0.1}
PORT_A=${PORT_A:-50051}
PORT_B=${PORT_B:-50052}

children=()
# shellcheck disable=SC2317 # The trap calls it.
end() {
  trap - EXIT
  [ ${#children[@]} -eq 0 ] || kill -TERM "${children[@]}" 2>/dev/null || true
  wait
}
trap end EXIT
trap 'exit 0' INT TERM

adapter() { # NAME ADDRESS PORT
  zmqengine smg --worker "$2" --client-key "$KEYS/gateway.key_secret" --server-key "$KEYS/$1.key" \
    --listen "127.0.0.1:$3" &
  children+=($!)
}

adapter a "$WORKER_A" "$PORT_A"
adapter b "$WORKER_B" "$PORT_B"

# Without --prometheus-host its metrics would be open to all addresses.
smg launch --worker-urls "grpc://127.0.0.1:$PORT_A" "grpc://127.0.0.1:$PORT_B" \
  --host "$HOST" --port "$PORT" --prometheus-host "$HOST" --policy cache_aware "$@" &
children+=($!)

# The first that ends takes the others along.
wait -n
