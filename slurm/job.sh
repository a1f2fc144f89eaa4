#!/bin/bash
# {{ title }}: rendered by `meshwright submit` from slurm/{{ template }}. One srun starts all ranks; this script starts them
# again, requeues the job or stops, according to how they ended:
#   0 done    85 saved, run me again    86 the user's mistake    87 bad node    88 numerics    89 out of memory    other: a failure
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}

# Of the shell that calls sbatch a job gets what would be options of the commands below, and ranks that are not its own.
unset "${!SBATCH_@}" "${!SRUN_@}" "${!SQUEUE_@}" "${!SCANCEL_@}" "${!SCONTROL_@}" "${!SLURM_CPU_BIND@}" SLURM_TIME_FORMAT \
  RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MESHWRIGHT_NODES

run={{ run }}
job=$SLURM_JOB_ID
# Towards SLURM: the last task of an array has the array's number, by which SLURM means all of its tasks.
slurm_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
slurm_job=${slurm_job:-$job}
history=$run/slurm/history          # one line per start and per end of the ranks, for people, `status` and the breaker
restart=${SLURM_RESTART_COUNT:-0}
outcome=$run/slurm/outcome.$job.$restart    # the exit code of the first rank that knew why it ended
lease_at_begin=$(cat "$run/lease" 2>/dev/null)
retries={{ retries }}
restarts_without_checkpoint={{ restarts_without_checkpoint }}
jobs_in_chain={{ chain }}
copies={{ copies }}                    # checkpoint.neighbor_copies
go_on="go on with  "{{ go_on }}
asked=                              # set once the run was asked to stop
near_end=                           # set once the time limit is near

say() { printf '%(%F %T)T  job %s: %s\n' -1 "$job" "$*"; }

# A node that was frozen, or cut off, may go on after SLURM has held it for dead and started the job elsewhere. What this script
# then did, such as a requeue, would be done to that start. RUN/lease says who has the run: framework/lease.py.
refuse_if_stale() {
  local now try
  for try in {1..10}; do
    if now=$(cat "$run/lease" 2>/dev/null); then break; fi
    if [ "$try" = 10 ]; then    # only a lease that was read tells: ranks and files have fences of their own
      say "cannot read $run/lease: goes on without knowing who has the run"
      return
    fi
    sleep 1
  done
  lease_at_begin=${lease_at_begin:-$now}    # which could not be read when this script began
  if [ "$now" = "$lease_at_begin" ] || [[ $now == *"\"job\": \"$job\", \"restart\": $restart,"* ]]; then return; fi
  say "restart $restart was held for dead, and the run was taken over: $now. Nothing is done"
  exit 86
}

newest_step() { # of the checkpoints. Whether one is damaged rank 0 finds out, which renames it once it goes on without it
  local newest=0 path
  for path in "$run"/checkpoints/step-*; do    # in the order of their numbers, which have leading zeros
    if [[ ${path##*/} =~ ^step-([0-9]+)$ && -e $path/manifest.json ]]; then newest=$((10#${BASH_REMATCH[1]})); fi
  done
  if [ -e "$run/checkpoints.url" ]; then    # they lie in an object store: what was committed last stands beside the run
    path=$(grep -o '[0-9][0-9]*' "$run/checkpoints.json" 2>/dev/null || true)
    newest=${path:-0}
  fi
  # A start from a step that nodes held is progress, too: where the newest start began is in the run's lineage.
  if [ "${copies:-0}" -gt 0 ]; then
    path=$(grep -o '"first": [0-9]*' "$run/lineage.json" 2>/dev/null | tail -n 1)
    if [ "${path##* }" -gt "$newest" ] 2>/dev/null; then newest=${path##* }; fi
  fi
  echo "$newest"
}

note() { printf '%(%FT%T%z)T job=%s restart=%s %s\n' -1 "$job" "${SLURM_RESTART_COUNT:-0}" "$*" >> "$history"; }

count() { grep -c " job=$job .*$1" "$history"; }

# Starts of this job since the last one from before STEP. One from a later step counts too: its checkpoint was damaged, and
# what came of it is no more than STEP.
starts_without_progress() { # starts_without_progress STEP
  local starts=0 of what from
  while read -r _ of _ what from _; do
    if [ "$of $what" != "job=$job start" ]; then continue; fi
    if [ "${from#from=}" -lt "$1" ]; then starts=0; else starts=$((starts + 1)); fi
  done < "$history"
  echo "$starts"
}

field() { # field NAME: of this job. A controller that is down for a while is asked again: without an answer the job would end
  local try said
  for try in {1..150}; do
    if said=$(scontrol --oneliner show job "$slurm_job"); then break; fi
    if [ "$try" = 1 ]; then say "SLURM's controller does not answer: asking again for five minutes" >&2; fi
    sleep 2
  done
  grep -oE " $1=[^ ]*" <<< "${said%%$'\n'*}" | cut -d= -f2
}

seconds_of() { # seconds_of FIELD: a moment of this job on the Unix clock; nothing where SLURM does not say
  local moment
  moment=$(field "$1")
  if [ -n "$moment" ]; then date --date="$moment" +%s 2>/dev/null || true; fi
}

and_excluded() { # and_excluded NODES: with those that the job leaves out already, by its user's wish or for an earlier fault
  local had new
  had=$(field ExcNodeList)
  if [ -z "$had" ] || [ "$had" = "(null)" ]; then echo "$1"; return; fi
  new=$(tr , '\n' <<< "$1" | grep -vxFf <(scontrol show hostnames "$had") | paste -sd,)
  echo "$had${new:+,$new}"
}

forget_copies() { # what this job's nodes hold of the run takes memory that others need
  if [ "${copies:-0}" -eq 0 ]; then return; fi
  local held names node removing=()
  names=$(field NodeList)                      # no longer those that SLURM holds for lost
  held=/dev/shm/meshwright-$(id -u)/${run##*/}-$(printf %s "$run" | sha256sum | cut -c 1-8)
  for node in $(scontrol show hostnames "${names:-$SLURM_JOB_NODELIST}"); do    # each by itself: one may be lost
    timeout 60 srun --quiet --overlap --nodes=1 --ntasks=1 --nodelist="$node" rm -rf "$held" 2>/dev/null &
    removing+=($!)
  done
  wait "${removing[@]}"
}

# A job that is one too many ends with 86 as well. What is asked of the run, its chain and its copies are the other job's.
is_of_another_job() {
  local holder
  holder=$(grep -o '"job": "[0-9]*"' "$run/lease" 2>/dev/null | tr -dc 0-9)
  if [ -z "$holder" ] || [ "$holder" = "$job" ]; then return 1; fi
  squeue --noheader --states=RUNNING,SUSPENDED,COMPLETING --job="$holder" --format=%i 2>/dev/null | grep -q .
}

waiting_in_chain() { # the jobs of this run's chain that wait: `submit` has noted them. Another run's may bear the same name
  local jobs
  jobs=$(grep -vxF "$job" "$run/slurm/jobs" 2>/dev/null | paste -sd,)
  if [ -n "$jobs" ]; then squeue --noheader --states=PENDING --job="$jobs" --format=%i 2>/dev/null; fi
}

stop() { # stop CODE WHY: the last word on this run; what still waits in its chain has nothing to go on with
  say "$2"
  if [ "$1" = 86 ] && is_of_another_job; then exit 86; fi
  rm -f "$run"/request-*
  if [ "$1" != 0 ]; then forget_copies; fi    # ranks that are done have done so
  local waiting=()
  if [ "$jobs_in_chain" -gt 1 ]; then mapfile -t waiting < <(waiting_in_chain); fi
  if [ "${#waiting[@]}" -gt 0 ]; then scancel --quiet --state=PENDING "${waiting[@]}"; fi
  exit "$1"
}

brief_job() { # brief_job NAME BEGIN COMMANDS: a job of one moment, on any node; sh runs it, not bash
  sbatch --quiet --job-name="$1-$job" --output=/dev/null --nodes=1 --ntasks=1 --time=2 --deadline=now+4minutes \
    ${2:+--begin="$2"} \
    ${SLURM_JOB_PARTITION:+--partition="$SLURM_JOB_PARTITION"} ${SLURM_JOB_ACCOUNT:+--account="$SLURM_JOB_ACCOUNT"} \
    ${SLURM_JOB_QOS:+--qos="$SLURM_JOB_QOS"} --wrap "$3"
}

# SLURM lets a requeued job wait two minutes, for its nodes refuse a job that they have revoked in the same second. It takes
# the delay back when it is asked to, but only once the job has left its nodes, when nothing of this script is left: a brief job
# asks, for a start some seconds later. A node that was frozen may still hold the job's former start. It refuses the new one, SLURM
# drains the node and holds the job, until somebody releases it: another brief job does.
start_soon() { # start_soon [CHANGE...]: other changes that a job takes only while it waits
  brief_job soon "${soon_after:-}" "for try in \$(seq 240); do
      state=\$(squeue --noheader --states=all --job=$slurm_job --format=%T)
      case \$state in
        PENDING) scontrol update JobId=$slurm_job StartTime=now+3 ${*@Q}; exit ;;
        CANCELLED) exit ;;
      esac
      sleep 0.5
    done" || return
  brief_job free now+1minute "case \$(squeue --noheader --states=PENDING --job=$slurm_job --format=%r) in
      launch?failed?requeued?held) scontrol release $slurm_job ;;
    esac" || true
}

requeue() { # requeue WHY [CHANGE...]: this allocation ends, the job waits for another one
  refuse_if_stale
  say "$1; requeued"
  trap '' TERM                      # which the requeue sends to this script
  forget_copies                     # SLURM gives these nodes to others, and the job mostly gets other ones
  start_soon "${@:2}" || say "cannot ask for an early start: the job waits two minutes"
  if ! scontrol requeue "$slurm_job"; then
    stop 85 "this cluster does not requeue: $go_on"
  fi
  exit 0
}

go_on_in_chain() { # go_on_in_chain WHY: the next job of the chain has what this one saved
  refuse_if_stale
  if [ -n "$(waiting_in_chain)" ]; then
    say "$1; the next job of the chain goes on"
    forget_copies
    exit "$code"
  fi
  stop "$code" "$1, and the chain is at its end: $go_on"
}

time_is_near() {
  near_end=yes
  say "the time limit is near: the ranks save"
  # More than once: a rank that is just starting may not be listening yet.
  while :; do scancel --quiet --signal=USR1 "$slurm_job"; sleep 5; done &
  asking=$!
}
limit_s=$(date --date="$(field EndTime)" +%s)
trap time_is_near USR1
trap : TERM                         # scancel or preemption: the ranks get it too, save and end; `field` says which it was

{% if moves %}
{% include "elastic.sh" %}

{% endif %}
{% if orders %}
# Groups of tp or ep need several nodes each: ranks take them in an order by which a group's nodes lie together, from what
# SLURM says on each node of where it is. Without an answer of every node they keep SLURM's order.
ask_nodes() {
  local count={{ '"${#nodes[@]}"' if moves else nodes }}
  # shellcheck disable=SC2016    # the nodes expand them
  MESHWRIGHT_NODES=$(timeout --kill-after=1 60 srun --overlap --quiet --job-name=ask --export=ALL \
    --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --cpus-per-task=1 {{ '--nodelist="$node_list" ' if moves }}bash -c \
    'echo "$SLURM_NODEID $SLURMD_NODENAME ${SLURM_TOPOLOGY_ADDR:--} ${SLURM_TOPOLOGY_ADDR_PATTERN:--}"' \
    < /dev/null | paste -sd ';')
  export MESHWRIGHT_NODES
}

{% endif %}
start_ranks() {
  rm -f "$outcome"
{% if orders %}
  ask_nodes
{% endif %}
  # Below the ports that the kernel hands out, and nobody answers there. If it is taken meanwhile, the ranks fail and are
  # started again with another one.
  MASTER_PORT=$((20000 + RANDOM % 12000))
  while (exec 3<> "/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((20000 + RANDOM % 12000)); done
  MESHWRIGHT_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')    # with which ranks seal what they send one another
  export MASTER_PORT MESHWRIGHT_SECRET
{% if assignments %}
  # launch.environment is for the ranks alone: the words on these lines are of the script's variables, as they are meant.
  # shellcheck disable=SC2097,SC2098
{% endif %}
{% for assignment in assignments %}
  {{ assignment }} \
{% endfor %}
{% block ranks %}{% endblock %}
  local ranks=$!
{% if moves %}
  end_where_nodes_are_lost "$ranks" &
  local watcher=$!
{% endif %}
  while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done    # a signal ends `wait`, not the ranks
{% if moves %}
  kill "$watcher" 2>/dev/null; wait "$watcher" 2>/dev/null
{% endif %}
  if [ -n "${asking:-}" ]; then kill "$asking" 2>/dev/null; wait "$asking" 2>/dev/null; asking=; fi
  # What a rank said of itself is more than srun's code, which may be that of a rank it killed, or 0 when it lost sight of them.
  local said
  said=$(cat "$outcome" 2>/dev/null)
  rm -f "$outcome"
  case $said:$code in
    :0) code=1 ;;
    0:* | :*) ;;
    *) code=$said ;;
  esac
}

# --- set-up: what the site and the recipe ask for
{% for line in set_up %}
{{ line }}
{% endfor %}

{% if references %}
need() { # need NAME...: what launch.environment refers to
  local name
  for name; do
    if [ -z "${!name:-}" ]; then
      stop 86 "not started: launch.environment refers to $name, which this job does not have: export it where you submit"
    fi
  done
}
need {{ references | join(" ") }}
{% endif %}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PYTHONPATH=$(tr -s : <<< "$run/code:${PYTHONPATH:-}")    # an empty word in it would be the folder in which the job stands
export MASTER_ADDR MESHWRIGHT_OUTCOME=$outcome PYTHONPATH=${PYTHONPATH%:}
MESHWRIGHT_QUEUED="$(seconds_of SubmitTime) $(seconds_of StartTime)"    # for goodput: how long the job waited
export MESHWRIGHT_QUEUED
# `python -m` looks into its folder first, which may be a clone of this package: the run's code is RUN/code. By its other name
# apptainer lets it in with --cleanenv as well.
export PYTHONSAFEPATH=1 APPTAINERENV_PYTHONSAFEPATH=1
# Files are UTF-8, whatever the locale of the node.
export PYTHONUTF8=1 APPTAINERENV_PYTHONUTF8=1

# --- life
mkdir -p "$run/slurm"
touch "$history"
{% if moves %}
touch "$run/slurm/bad-nodes"
: > "$left_out"
{% endif %}
while :; do
  refuse_if_stale
  step=$(newest_step)
  starts=$(starts_without_progress "$step")
  if [ "$starts" -gt "$restarts_without_checkpoint" ]; then
    stop 1 "stopped: $starts starts from step $step, none with a newer checkpoint. What failed is above and in $history"
  fi
{% if moves %}
  if ! choose_nodes; then requeue_without_lost_nodes "too few nodes are left, the run needs ${counts[0]}"; fi
  keep_guard
  note "start from=$step nodes=$node_list"
  say "starts $(({{ ranks_per_node }} * ${#nodes[@]})) ranks on $node_list, from step $step"
{% else %}
  note "start from=$step nodes=$SLURM_JOB_NODELIST"
  say "starts {{ ranks }} on $SLURM_JOB_NODELIST, from step $step"
{% endif %}
  start_ranks
  refuse_if_stale
  note "end code=$code step=$(newest_step)"
  if [ -e "$run/request-stop" ]; then asked=yes; fi    # by `meshwright stop`, which waits until the file is gone
  case $code in
    0)  stop 0 "done" ;;
    86) stop 86 "ended with 86, a mistake in the input: not started again" ;;
    88) stop 88 "ended with 88, the numbers left the finite range: not started again" ;;
    89) if [ "$(newest_step)" -le "$step" ]; then    # else it fits, but for what it met late: a longer document, a fragment
          stop 89 "ended with 89, out of memory: not started again, it would end in the same way. What to lower is above"
        fi ;;
  esac
  if [ -n "$asked" ]; then stop "$code" "ended with $code at step $(newest_step), as it was asked to: $go_on"; fi
  state=$(field JobState)
  refuse_if_stale                     # the controller may have been away for minutes
  if [ "$state" != RUNNING ]; then    # somebody else ends this job
    if [ -n "$near_end" ] && [ "$(date +%s)" -ge "$limit_s" ]; then
      if [ "$jobs_in_chain" -gt 1 ]; then go_on_in_chain "cut by the time limit before it had saved"; fi
      requeue "cut by the time limit before it had saved"
    fi
    if [ "$(field PreemptTime)" != None ]; then start_soon; fi
    say "ended by SLURM with $code at step $(newest_step)"
    exit "$code"
  fi
{% if moves %}
  if [ "$code" -eq 87 ] && [ -z "$near_end" ]; then leave_out_bad_nodes; continue; fi
{% endif %}
  if [ "$jobs_in_chain" -gt 1 ]; then
    case $near_end:$code in
      *:85) go_on_in_chain "saved at step $(newest_step)" ;;
      *:87) ;;
      yes:*) go_on_in_chain "ended with $code near the time limit, at step $(newest_step)" ;;
    esac
  fi
  case $code in
    85) requeue "saved at step $(newest_step)" ;;
    87) bad=$(sort -u "$run/slurm/bad-nodes" | paste -sd,)
        requeue "bad nodes are left out from now on: $bad" "ExcNodeList=$(and_excluded "$bad")" ;;
  esac
  if [ -n "$near_end" ]; then requeue "ended with $code while saving"; fi
  failures=$(($(count ' end code=') - $(count ' end code=8[57] ')))
  if [ "$failures" -gt "$retries" ]; then
    stop "$code" "stopped: failure $failures of this job (launch.retries=$retries); the last exit code is $code"
  fi
  say "ended with $code at step $(newest_step): started again"
{% if moves %}
  leave_out_lost_nodes
{% endif %}
done
