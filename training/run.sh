#!/usr/bin/env bash
# Train the tiny checkpoint from prepared data: ./run.sh STAGE. See README.md.
#   start MINUTES DRAFTER_MINUTES [RESUME_FOLDER]   everything, detached; then poll
#   drafter MINUTES FOLDER [CHECKPOINT]              go on with the drafter in FOLDER, detached; then
#                                                    poll. The backbone: master files in FOLDER, or
#                                                    that of a checkpoint
#   poll SECONDS                                     wait, show the log's end, copy small files
#   collect backbone|drafter                         copy the weights
# Stages run in RUN_DIR (default /tmp/tiny-v41-run); poll and collect copy to OUT (default ./out).
set -uo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
RUN_DIR=${RUN_DIR:-/tmp/tiny-v41-run}
OUT=${OUT:-./out}
DATA=${DATA:-$HERE/data}
CONFIG=${CONFIG:-$HERE/configs/tiny-v41.json}
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$HERE:$HERE/..${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} TOKENIZERS_PARALLELISM=false
TRAIN_ARGS=${TRAIN_ARGS:-} DRAFTER_ARGS=${DRAFTER_ARGS:-} EVAL_ARGS=${EVAL_ARGS:-} BENCH_ARGS=${BENCH_ARGS:-}

stage() {  # name command...
  local name=$1; shift
  echo "=== $name $(date +%H:%M:%S)"
  "$@" || { echo "=== $name FAILED"; touch "$RUN_DIR/failed.$name"; return 1; }
}

everything() {  # minutes drafter_minutes [resume]
  local resume=(); [ -n "${3:-}" ] && resume=(--resume "$3")
  # shellcheck disable=SC2086
  {
    stage benchmark "$PYTHON" -m deepinfer_training.benchmark --data "$DATA" --config "$CONFIG" \
      --out "$RUN_DIR/speed.json" $BENCH_ARGS
    stage train "$PYTHON" -m deepinfer_training.train --data "$DATA" --config "$CONFIG" \
      --out "$RUN_DIR" --minutes "$1" --speed "$RUN_DIR/speed.json" "${resume[@]}" $TRAIN_ARGS &&
    stage drafter "$PYTHON" -m deepinfer_training.train_drafter --data "$DATA" --config "$CONFIG" \
      --run "$RUN_DIR" --minutes "$2" --speed "$RUN_DIR/speed.json" $DRAFTER_ARGS
    stage evaluate "$PYTHON" -m deepinfer_training.evaluate --data "$DATA" --config "$CONFIG" \
      --run "$RUN_DIR" $EVAL_ARGS
    echo "=== finished $(date +%H:%M:%S)"
    touch "$RUN_DIR/finished"
  } > "$RUN_DIR/run.log" 2>&1
}

more_drafter() {  # minutes
  # shellcheck disable=SC2086
  {
    [ -e "$RUN_DIR/speed.json" ] || stage benchmark "$PYTHON" -m deepinfer_training.benchmark \
      --data "$DATA" --config "$CONFIG" --out "$RUN_DIR/speed.json" $BENCH_ARGS
    stage drafter "$PYTHON" -m deepinfer_training.train_drafter --data "$DATA" --config "$CONFIG" \
      --run "$RUN_DIR" --minutes "$1" --resume --speed "$RUN_DIR/speed.json" $DRAFTER_ARGS
    echo "=== finished $(date +%H:%M:%S)"
    touch "$RUN_DIR/finished"
  } > "$RUN_DIR/run.log" 2>&1
}

case "${1:-}" in
  start)
    rm -rf "$RUN_DIR"; mkdir -p "$RUN_DIR" "$OUT"
    export RUN_DIR DATA CONFIG PYTHON HERE TRAIN_ARGS DRAFTER_ARGS EVAL_ARGS BENCH_ARGS
    setsid nohup bash "$HERE/run.sh" everything "${2:?minutes}" "${3:?drafter minutes}" "${4:-}" \
      < /dev/null > /dev/null 2>&1 &
    ;;
  everything) shift; everything "$@" ;;
  drafter)
    from=${3:?folder with drafter-*.safetensors}
    rm -rf "$RUN_DIR"; mkdir -p "$RUN_DIR" "$OUT"
    cp "$from"/drafter-*.safetensors "$RUN_DIR"/ || exit 2
    for file in "${4:-$from}"/m*-*.safetensors; do  # master-* or a checkpoint's model-*
      name=${file##*/}
      cp "$file" "$RUN_DIR/master-${name#*-}" || exit 2
    done
    cp "$from"/speed.json "$RUN_DIR"/ 2> /dev/null  # what the machine's benchmark has chosen
    export RUN_DIR DATA CONFIG PYTHON HERE DRAFTER_ARGS BENCH_ARGS
    setsid nohup bash "$HERE/run.sh" more_drafter "${2:?minutes}" < /dev/null > /dev/null 2>&1 &
    ;;
  more_drafter) shift; more_drafter "$@" ;;
  poll)
    for _ in $(seq 1 "${2:-60}"); do [ -e "$RUN_DIR/finished" ] && break; sleep 1; done
    tail -n "${LINES_SHOWN:-40}" "$RUN_DIR/run.log"
    mkdir -p "$OUT"; cp "$RUN_DIR"/run.log "$RUN_DIR"/*.json "$OUT"/ 2> /dev/null
    ls "$RUN_DIR" | tr '\n' ' '
    ;;
  collect)
    case "${2:-}" in
      backbone) files=("$RUN_DIR"/master-*.safetensors) ;;
      drafter) files=("$RUN_DIR"/drafter-*.safetensors "$RUN_DIR"/run.log) ;;
      *) echo "collect backbone or drafter, not '${2:-}'" >&2; exit 2 ;;
    esac
    mkdir -p "$OUT"; cp "${files[@]}" "$OUT"/; ls -l "$OUT"
    ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac
