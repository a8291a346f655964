"""SLURM: a batch script for `sbatch`.

The server runs in its own step, so that it outlives the script when SLURM stops the job. It writes its
address to a file in the job's folder, and its tokens to a folder there that only the job's user can read. The
workers run in a second step, where srun assigns the ranks. SLURM
sends the notice (`--signal`) to both steps directly.

User input enters the script in three ways, and none allows an injection: as flags and arguments, quoted by
`shlex`; in `#SBATCH` lines, checked against patterns in `hubring.ps.config.values`; and as the user's own
`#SBATCH` lines, which cannot contain a line break.
"""

from __future__ import annotations

import shlex

from hubring.ps.core.errors import Preempted
from hubring.ps.process.restarts import RESTARTABLE
from hubring.ps.submit.job import GRACE_SECONDS, Submission

ADDRESS_SECONDS = 120
"""How long the script waits for the server's address; Python can be slow to load from a network folder."""

_SCRIPT = """\
# Made by: ps-server submit --engine slurm

# The flags below contain all settings. Unset the PS_* variables that sbatch passes from the submitting shell.
unset "${{!PS_@}}"
address=hubring-$SLURM_JOB_ID.address
result=hubring-$SLURM_JOB_ID.result
# The server makes its tokens here. Only this user can read them.
secrets=hubring-$SLURM_JOB_ID.secrets
tokens=$secrets/tokens
rm -rf "$address" "$result" "$secrets"
trap 'rm -rf "$address" "$result" "$secrets"' EXIT
mkdir -m 700 "$secrets"
{end}# srun does not inherit this from the job.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# The server's own step: when SLURM stops the job, the server outlives this script until it has saved.
srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$SLURMD_NODENAME" \\
  ps-server start --host "$(hostname)" --port 0 --address-file "$address" --token-file "$tokens" \\
  {server} > "$result" &
server=$!
for _ in $(seq {looks}); do
  if [ -s "$address" ] || ! kill -0 $server 2> /dev/null; then break; fi
  sleep 0.2
done
if ! [ -s "$address" ]; then
  echo "no address of ps-server in $PWD/$address: ps-server exited (see its output above), or took more" \\
    "than {patience} s; check that ps-server is on the PATH of $(hostname) and can write to $PWD" >&2
  if kill $server 2> /dev/null; then end 69; fi
  wait $server
  end $?
fi

srun --overlap --kill-on-bad-exit=0 --wait=0 \\
  ps-worker --server "$(cat "$address")" --token-file "$tokens" {worker}
code=$?
# All workers have exited. The server exits with its job, and its exit code counts: on a hub, the job can
# finish without a lost worker. If the job never began, the server forgets it after the last lease and waits
# for another one, so stop the server.
begun=1
while kill -0 $server 2> /dev/null; do
  if ps-server status --token-file "$tokens" "$(cat "$address")" 2> /dev/null | grep -q '"job": ""'; then
    begun=
    scancel --signal=TERM "$SLURM_JOB_ID" # signals all steps; only the server's step is left
    break
  fi
  sleep 1
done
wait $server
ended=$?
[ -z "$begun" ] || code=$ended
cat "$result"
end $code
"""

_END = """\
end() {{ # ends the job with this exit code; first queues it again if a restart helps
  restarts=${{SLURM_RESTART_COUNT:-0}}
  case $1 in
{requeue}    {lost}) # a process was lost or stopped
      if [ "$restarts" -lt {most} ]; then
        echo "exit code $1: restart $((restarts + 1)) of {most}" >&2
        sleep $((restarts < 5 ? 1 << restarts : 30))
        scontrol requeue "$SLURM_JOB_ID"
      fi ;;
  esac
  exit "$1"
}}
"""
_PREEMPTED = f"""\
    {Preempted.exit_code}) scontrol requeue "$SLURM_JOB_ID" ;; # preempted
"""


def render(job: Submission) -> str:
    """Returns the batch script."""
    script = _SCRIPT.format(
        server=shlex.join(job.server_words),
        worker=shlex.join(job.worker_words),
        patience=ADDRESS_SECONDS,
        looks=ADDRESS_SECONDS * 5,
        end=_END.format(
            requeue=_PREEMPTED if job.config.requeue else "",
            lost=" | ".join(map(str, sorted(RESTARTABLE))),
            most=job.restarts,
        ),
    )
    return "\n".join(["#!/bin/bash", *_directives(job), script])


def _directives(job: Submission) -> list[str]:
    config = job.config
    # Seconds between the notice and the time limit; for a short job, a quarter of its limit.
    notice = GRACE_SECONDS if job.seconds is None else max(1, min(GRACE_SECONDS, job.seconds // 4))
    given = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks": job.workers,
        "ntasks-per-node": job.per_node if job.nodes else None,
        "gpus-per-node": config.gpus or None,
        "cpus-per-task": config.cpus,
        "mem-per-cpu": f"{config.memory * 1024 // (config.cpus or 1)}M" if config.memory else None,
        "time": config.time,
        "partition": config.partition,
        "open-mode": "append",
        "signal": f"USR1@{notice}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None]
    requeue = ["#SBATCH --requeue"] if config.requeue or job.restarts else []
    return [*lines, *requeue, *config.engine_option]
