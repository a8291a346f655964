"""SLURM: a batch script, as `sbatch` reads it.

The server is a step of its own, so that it outlives the script where the job is
being stopped, and writes its address into a file in the job's folder. The workers
are a second step, in which srun gives each its rank. A notice (`--signal`) goes to
both steps without the script's help.

What the user said gets into the script in three ways, none of which can say
more than it should: as flags and arguments, which `shlex` quotes; in `#SBATCH`
lines, whose words have a pattern in `hubring.ps.config.kinds`; and as `#SBATCH` lines of the
user's own, which hold no line break.
"""

from __future__ import annotations

import shlex

from hubring.ps.submit.job import GRACE_SECONDS, Submission

ADDRESS_SECONDS = 120
"""How long the script waits for the server's address; Python may come from a slow network folder."""

_SCRIPT = """\
# Made by: ps-server submit --engine slurm
# ps-server listens with --insecure, as workers are asked for no credentials yet: the network between the
# nodes has to be one that you trust.

# All settings are among the flags below: none may come with the environment that sbatch passes on.
unset "${{!PS_@}}"
address=hubring-$SLURM_JOB_ID.address
result=hubring-$SLURM_JOB_ID.result
rm -f "$address" "$result"
trap 'rm -f "$address" "$result"' EXIT
# srun does not take this from the job by itself.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# A step of its own: where the job is being stopped it outlives this script, until it has saved.
srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$SLURMD_NODENAME" \\
  ps-server start --host "$(hostname)" --port 0 --address-file "$address" \\
  {server} > "$result" &
server=$!
for _ in $(seq {looks}); do
  if [ -s "$address" ] || ! kill -0 $server 2> /dev/null; then break; fi
  sleep 0.2
done
if ! [ -s "$address" ]; then
  echo "no address of ps-server in $PWD/$address: its lines above say why it ended, or it took more than" \\
    "{patience} s; is ps-server on the PATH of $(hostname), and may it write there?" >&2
  if kill $server 2> /dev/null; then exit 69; fi
  wait $server
  exit
fi

srun --overlap --kill-on-bad-exit=0 --wait=0 \\
  ps-worker --server "$(cat "$address")" {worker}
code=$?
# No worker is left. The server ends with its job, and knows best how that went: on a hub the others may have
# gone on without one. A job that never began it forgets once the last lease is over, and would wait on.
begun=1
while kill -0 $server 2> /dev/null; do
  if ps-server status "$(cat "$address")" 2> /dev/null | grep -q '"job": ""'; then
    begun=
    scancel --signal=TERM "$SLURM_JOB_ID" # goes to steps, and that is the only one left
    break
  fi
  sleep 1
done
wait $server
ended=$?
[ -z "$begun" ] || code=$ended
cat "$result"
{requeue}exit $code
"""

_REQUEUE = """\
if [ $code = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
"""


class Slurm:
    """SLURM, by `sbatch`."""

    command = ("sbatch",)
    mend = "submit on a login node of the cluster, or take there what --dry-run prints"

    def render(self, job: Submission) -> str:
        """The batch script."""
        script = _SCRIPT.format(
            server=shlex.join(job.server_words),
            worker=shlex.join(job.worker_words),
            patience=ADDRESS_SECONDS,
            looks=ADDRESS_SECONDS * 5,
            requeue=_REQUEUE if job.config.requeue else "",
        )
        return "\n".join(["#!/bin/bash", *_directives(job), script])


def _directives(job: Submission) -> list[str]:
    config = job.config
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
        "signal": f"USR1@{_notice(job)}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None]
    return [*lines, *(["#SBATCH --requeue"] if config.requeue else []), *config.engine_option]


def _notice(job: Submission) -> int:
    """Seconds from the notice to the end: a quarter of a short job's time, or it would come at the start."""
    return GRACE_SECONDS if job.seconds is None else max(1, min(GRACE_SECONDS, job.seconds // 4))
