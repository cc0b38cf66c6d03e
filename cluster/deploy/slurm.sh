#!/usr/bin/env bash
# A run under Slurm: a Ray head on the first node, a Ray worker on each of the others, the run on the first.
#
#   sbatch cluster/deploy/slurm.sh gsm8k_qwen3 --engines 12 --learner_ranks 4 --run_dir /shared/runs/gsm8k
#
# from the root of the repository, on storage that every node has, with `make setup EXTRA=gpu` done there. The arguments are those
# of `winnow train`. Five minutes before its time is over, and on `scancel --signal=TERM --batch JOB`, the run finishes its batch and
# writes a checkpoint; submitted or requeued again, the same line goes on from it.
#SBATCH --job-name=winnow
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=winnow-%j.log
set -euo pipefail

case " $* " in
    *" --run_dir "* | *" --run_dir="*) ;;
    *) echo "slurm.sh: give --run_dir PATH on storage that every node has, so that the run can go on" >&2; exit 2 ;;
esac
cd "${SLURM_SUBMIT_DIR:-.}"
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
port=${RAY_PORT:-26379}  # Ray keeps 10002 to 19999 for its workers

# A token of this job alone: without it nobody on the network can use the cluster.
umask 077
RAY_AUTH_TOKEN_PATH=$(mktemp "$PWD/.ray-token-${SLURM_JOB_ID:-local}-XXXXXX")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH
python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH"

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes%%$'\n'*}
# Each of these runs until the job ends, as a step of its own on one node.
on_node() { srun --nodes=1 --ntasks=1 --overlap --nodelist="$1" "${@:2}" & }
end() { kill "${steps[@]}" 2>/dev/null || true; wait || true; rm -f "$RAY_AUTH_TOKEN_PATH"; }
steps=()
trap end EXIT

on_node "$first" ray start --head --block --disable-usage-stats --port "$port" --dashboard-host 127.0.0.1
steps+=($!)
for node in $nodes; do
    [ "$node" = "$first" ] && continue
    on_node "$node" ray start --block --disable-usage-stats --address "$first:$port"
    steps+=($!)
done

# The nodes join within a minute or two; until then the run waits for them, and says so.
for _ in $(seq 60); do
    ray status --address "$first:$port" >/dev/null 2>&1 && break
    sleep 2
done

python -m cluster.launch train "$@" --ray_address "$first:$port" --autoscaling true --placement_timeout 300 --resume auto &
run=$!
trap 'kill -TERM "$run" 2>/dev/null || true' TERM INT
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do  # a signal ends `wait`, not the run
    code=0
    wait "$run" || code=$?
done
exit "$code"
