#!/bin/bash
{{ directives }}
# Made by: ps-server submit --engine slurm

# The flags below contain all settings. Unset the PS_* variables that sbatch passes from the submitting shell.
unset "${!PS_@}"
address=hubring-$SLURM_JOB_ID.address
result=hubring-$SLURM_JOB_ID.result
# The server makes its tokens here. Only this user can read them.
secrets=hubring-$SLURM_JOB_ID.secrets
tokens=$secrets/tokens
rm -rf "$address" "$result" "$secrets"
trap 'rm -rf "$address" "$result" "$secrets"' EXIT
mkdir -m 700 "$secrets"
end() { # ends the job with this exit code; first queues it again if a restart helps
  restarts=${SLURM_RESTART_COUNT:-0}
  case $1 in
{% if requeue %}
    {{ preempted }}) scontrol requeue "$SLURM_JOB_ID" ;; # preempted
{% endif %}
    {{ lost }}) # a process was lost or stopped
      if [ "$restarts" -lt {{ restarts }} ]; then
        echo "exit code $1: restart $((restarts + 1)) of {{ restarts }}" >&2
        sleep $((restarts < 5 ? 1 << restarts : 30))
        scontrol requeue "$SLURM_JOB_ID"
      fi ;;
  esac
  exit "$1"
}
# srun does not inherit this from the job.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# The server's own step: when SLURM stops the job, the server outlives this script until it has saved.
srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$SLURMD_NODENAME" \
  ps-server start --host "$(hostname)" --port 0 --address-file "$address" --token-file "$tokens" \
  {{ server }} > "$result" &
server=$!
for _ in $(seq {{ 5 * patience }}); do
  if [ -s "$address" ] || ! kill -0 $server 2> /dev/null; then break; fi
  sleep 0.2
done
if ! [ -s "$address" ]; then
  echo "no address of ps-server in $PWD/$address: ps-server exited (see its output above), or took more" \
    "than {{ patience }} s; check that ps-server is on the PATH of $(hostname) and can write to $PWD" >&2
  if kill $server 2> /dev/null; then end 69; fi
  wait $server
  end $?
fi

srun --overlap --kill-on-bad-exit=0 --wait=0 \
  ps-worker --server "$(cat "$address")" --token-file "$tokens" {{ worker }}
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
