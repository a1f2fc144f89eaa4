# --- nodes that come and go: the job keeps its nodes when one of them is lost (--no-kill), and its ranks move
counts=({{ counts | join(" ") }})      # so many nodes the run can be laid out on
left_out=$run/slurm/left-out.$job    # nodes of this allocation on which ranks are no longer started
node_patience_s=15                   # a node that starts nothing for so long is taken for lost
most=                                # nodes that a start uses at the most
guard=                               # the srun of the task that guards this job

job_nodes() { # the nodes that this job has now and that are not left out, one a line
  local names
  names=$(field NodeList)
  scontrol show hostnames "${names:-$SLURM_JOB_NODELIST}" | grep -vxFf "$left_out"
}

# Sets what the next start uses: `nodes`, in the order of its ranks, and the same as a word. As many as this job began with at
# the most, so that spare nodes stay spare.
choose_nodes() {
  local all count
  mapfile -t all < <(job_nodes)
  most=${most:-$((${#all[@]} - {{ spares }}))}
  nodes=()
  for count in "${counts[@]}"; do
    if [ "$count" -le "$most" ] && [ "$count" -le "${#all[@]}" ]; then nodes=("${all[@]:0:count}"); fi
  done
  MASTER_ADDR=${nodes[0]:-}
  if [ "${#nodes[@]}" -eq 0 ]; then return 1; fi
  node_list=$(IFS=,; scontrol show hostlist "${nodes[*]}")
}

leave_out() { # leave_out NODE WHY
  if grep -qxF "$1" "$left_out"; then return; fi
  echo "$1" >> "$left_out"
  note "left out node=$1"
  say "leaves out $1, which $2"
}

leave_out_bad_nodes() { # which ranks have found to be bad
  local node
  while read -r node; do leave_out "$node" "is bad"; done < <(sort -u "$run/slurm/bad-nodes")
}

answers() { # answers NODE: can anything be started there? SLURM itself may take minutes to notice that a node is lost
  # A try that fails at once says little: a controller that has just come back refuses every step. It is made again.
  local begin=$SECONDS
  while :; do
    timeout --kill-after=1 "$node_patience_s" srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --job-name=try true \
      < /dev/null &> /dev/null
    case $? in
      0 | 138 | 143) return 0 ;;    # USR1 and TERM: what asks the ranks to save and end reaches all steps of the job
      124 | 137) return 1 ;;        # `timeout` has ended it
    esac
    if [ $((SECONDS - begin)) -ge "$node_patience_s" ]; then return 1; fi
    sleep 1
  done
}

leave_out_lost_nodes() {
  local node answer any
  local -a silent=()
  local -A asked_nodes=()
  while :; do
    silent=() asked_nodes=() any=
    for node in $(job_nodes); do
      answers "$node" &
      asked_nodes[$node]=$!
    done
    for node in "${!asked_nodes[@]}"; do
      while wait "${asked_nodes[$node]}"; answer=$?; kill -0 "${asked_nodes[$node]}" 2> /dev/null; do :; done
      if [ "$answer" -eq 0 ]; then any=1; else silent+=("$node"); fi
    done
    # This script runs on one of them: where none answers, it is SLURM that does not, and nothing is known of the nodes.
    if [ -n "$any" ] || [ "${#silent[@]}" -eq 0 ]; then break; fi
    say "nothing can be started on any node, so SLURM does not answer: asks again"
    sleep 5
  done
  for node in "${silent[@]}"; do leave_out "$node" "does not answer"; done
}

end_where_nodes_are_lost() { # end_where_nodes_are_lost SRUN: of a lost node srun waits for the ranks until SLURM notices
  local step name
  until [ -e "$outcome" ]; do sleep 2; done    # a rank on another node has ended, for it lost its peers
  sleep 5
  while leave_out_lost_nodes; ! printf '%s\n' "${nodes[@]}" | grep -qxFf "$left_out"; do sleep 10; done
  while read -r step name; do
    if [ "$name" = ranks ]; then scancel --quiet --signal=KILL "$step"; fi
  done < <(squeue --noheader --steps --job="$slurm_job" --format="%i %j")
  kill -KILL "$1" 2> /dev/null
}

# A job that keeps its nodes keeps them as well when the one with this script is lost, and would hold the others until its time
# limit. A task on another node looks whether it is still there, and requeues the job where it is not.
guard_job() { # guard_job NODE RESTART: runs there; NODE is the one with the script
  trap : USR1                           # what asks the ranks to save reaches all steps of the job
  local names restart
  while sleep 5 || :; do                # which the signal ends, too
    names=$(field NodeList) restart=$(field Restarts)
    if [ -z "$names" ] || [ -z "$restart" ]; then continue; fi    # nobody answers
    if [ "$restart" != "$2" ]; then return; fi                    # this node was frozen, and the job has other nodes by now
    if scontrol show hostnames "$names" | grep -qxF "$1"; then continue; fi
    say "the node of this script is lost: $1; requeued" >> "$run/job.log"
    soon_after=now+15 start_soon    # the job leaves its nodes later than one whose nodes all answer
    scontrol requeue "$slurm_job" || scancel "$slurm_job"
    return
  done
}

keep_guard() { # one, on a node that is not left out
  if [ -n "$guard" ] && kill -0 "$guard" 2> /dev/null; then
    if ! grep -qxF "$guard_node" "$left_out"; then return; fi
    kill -KILL "$guard"
  fi
  guard_node=$(job_nodes | grep -vxF "$SLURMD_NODENAME" | tail -n 1)
  if [ -z "$guard_node" ]; then return; fi    # of a job of one node SLURM takes care
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$guard_node" --job-name=guard --quiet bash -c \
    "$(declare -f say field brief_job start_soon guard_job); run=\$0 job=$job slurm_job=$slurm_job; guard_job $SLURMD_NODENAME ${SLURM_RESTART_COUNT:-0}" "$run" < /dev/null &> /dev/null &
  guard=$!
}

# SLURM would hand out a lost node again before it has noticed.
requeue_without_lost_nodes() { # requeue_without_lost_nodes WHY
  local tries
  for tries in {1..120}; do
    if [ -e "$run/request-stop" ]; then stop 85 "$1; not requeued, as it was asked to stop: $go_on"; fi
    if [ "$(field JobState)" != RUNNING ]; then exit 85; fi    # somebody else ends this job
    if ! scontrol show hostnames "$(field NodeList)" | grep -xFf "$left_out" | grep -qvxFf "$run/slurm/bad-nodes"; then break; fi
    if [ "$tries" -eq 1 ]; then say "$1: waits until SLURM has noticed"; fi
    sleep 5
  done
  local bad
  bad=$(sort -u "$run/slurm/bad-nodes" | paste -sd,)
  requeue "$1" ${bad:+"ExcNodeList=$(and_excluded "$bad")"}
}
