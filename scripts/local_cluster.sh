#!/usr/bin/env bash
# A real SLURM cluster of several nodes on this one machine, to try `meshwright submit` before a real cluster is asked.
# Needs root, Linux and Debian's packages slurm-wlm and munge; neither systemd nor cgroups nor GPUs.
#
#   scripts/local_cluster.sh install           apt-get install the two packages
#   scripts/local_cluster.sh start [NODES]     start (default: 3 nodes n1 n2 n3, in the partitions main and high)
#   eval "$(scripts/local_cluster.sh env)"     let sbatch, squeue and meshwright of this shell talk to it
#   scripts/local_cluster.sh kill NODE         the node loses its power: all in it dies at once
#   scripts/local_cluster.sh boot NODE         it comes back
#   scripts/local_cluster.sh freeze NODE       all in it stops, as if it were cut off: SLURM takes it for dead
#   scripts/local_cluster.sh thaw NODE         all in it goes on, as if nothing had happened
#   scripts/local_cluster.sh processes NODE    what runs in it
#   scripts/local_cluster.sh daemon kill NAME  kill -9 of one daemon alone: slurmctld, or the slurmd of a node by the node's name
#   scripts/local_cluster.sh daemon start NAME   it is started again
#   scripts/local_cluster.sh stop              end all jobs and all daemons that `start` started; the files stay
#
# Everything is below $MESHWRIGHT_CLUSTER (default ~/.meshwright_cluster). A node is a namespace of processes, host name and
# mounts with a slurmd in it: its host name is n1, /etc/hosts knows all nodes (as 127.0.0.1), and killing the namespace's
# first process kills the node. Jobs in `high` preempt those in `main`.
set -euo pipefail

place=${MESHWRIGHT_CLUSTER:-$HOME/.meshwright_cluster}
switches=${MESHWRIGHT_CLUSTER_SWITCHES:-0}       # leaf switches of a tree, over which nodes are dealt in turn; 0: no topology
first_port=${MESHWRIGHT_CLUSTER_PORT:-27800}     # the controller's; node i listens i above it
export SLURM_CONF=$place/slurm.conf

fail() { echo "local_cluster: $*" >&2; exit 1; }

lives() { # lives PIDFILE; a zombie does not
  [ -s "$1" ] && grep -qs '^State:\s[^Z]' "/proc/$(cat "$1")/status"
}

wait_for() { # wait_for SECONDS COMMAND...
  local tries=$(($1 * 10)); shift
  while ! "$@" > /dev/null 2>&1; do
    if [ "$tries" -le 0 ]; then return 1; fi
    tries=$((tries - 1)); sleep 0.1
  done
}

write_configuration() { # write_configuration NODES
  mkdir -p "$place"/{state,log,munge,gpu}; chmod 700 "$place/munge"
  cp /etc/hosts "$place/hosts"
  : > "$place/cgroup.conf"
  echo AutoDetect=off > "$place/gres.conf"
  cat > "$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$first_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$place/munge/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/nodes/%n/spool
SlurmdPidFile=$place/nodes/%n/slurmd.pid
SlurmctldPidFile=$place/slurmctld.pid
SlurmctldLogFile=$place/log/slurmctld.log
SlurmdLogFile=$place/log/slurmd.%n.log
# No cgroups: processes are followed by their parents, and nothing confines them to the CPUs and memory they asked for.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# No database: jobs are forgotten by and by, and sacct knows nothing.
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MinJobAge=3600
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=5
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Everything sooner than on a real cluster (SlurmdTimeout 300, KillWait 30), so that trying out takes seconds.
SlurmdTimeout=15
SlurmctldTimeout=10
MessageTimeout=5
KillWait=20
NodeName=DEFAULT CPUs=8 RealMemory=8000 Gres=gpu:8 State=UNKNOWN
CONF
  for gpu in {0..7}; do : > "$place/gpu/$gpu"; done    # a device is a file; SLURM only counts them
  for ((i = 1; i <= $1; i++)); do
    echo "NodeName=n$i NodeHostname=n$i NodeAddr=127.0.0.1 Port=$((first_port + i))" >> "$SLURM_CONF"
    echo "NodeName=n$i Name=gpu File=$place/gpu/[0-7]" >> "$place/gres.conf"
    echo "127.0.0.1 n$i" >> "$place/hosts"
  done
  if [ "$switches" -gt 0 ]; then
    echo TopologyPlugin=topology/tree >> "$SLURM_CONF"
    : > "$place/topology.conf"
    for ((i = 1; i <= switches; i++)); do
      echo "SwitchName=leaf$i Nodes=$(seq -s , -f n%.0f "$i" "$switches" "$1")" >> "$place/topology.conf"
    done
    echo "SwitchName=root Switches=$(seq -s , -f leaf%.0f "$switches")" >> "$place/topology.conf"
  fi
  cat >> "$SLURM_CONF" <<CONF
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
CONF
}

start_munge() {
  if lives "$place/munged.pid"; then return; fi
  [ -s "$place/munge/key" ] || (umask 077; head -c 128 /dev/urandom > "$place/munge/key")
  chmod 755 "$place/munge"                              # clients come to the socket
  munged --force --key-file="$place/munge/key" --socket="$place/munge/socket" --pid-file="$place/munged.pid" \
    --log-file="$place/log/munged.log" --seed-file="$place/munge/seed" 2>> "$place/log/munged.log"
  wait_for 5 munge --socket="$place/munge/socket" --no-input || fail "munged does not answer, see $place/log/munged.log"
}

start_controller() {
  if lives "$place/slurmctld.pid"; then return; fi
  slurmctld -f "$SLURM_CONF"
  wait_for 10 sh -c 'scontrol ping | grep -q UP' || fail "slurmctld does not answer, see $place/log/slurmctld.log"
}

boot() { # boot NODE
  local node=$1 folder=$place/nodes/$1
  if lives "$folder/init.pid"; then return; fi
  mkdir -p "$folder/spool"; rm -f "$folder/init.pid"
  # The namespace's first process starts slurmd and reaps what is orphaned in it; a slurmd that dies does not take the node along.
  # shellcheck disable=SC2016    # the inner shell expands them
  setsid unshare --pid --fork --uts --mount --mount-proc --propagation private bash -c '
      hostname "$1"; mount --bind "$2/hosts" /etc/hosts
      slurmd -D -N "$1" -f "$SLURM_CONF" &
      while :; do wait -n || sleep 0.2; done' init "$node" "$place" \
    >> "$place/log/node.$node.log" 2>&1 < /dev/null &
  local unshare=$!
  wait_for 5 grep -q . "/proc/$unshare/task/$unshare/children" || fail "node $node died, see $place/log/node.$node.log"
  tr -d ' ' < "/proc/$unshare/task/$unshare/children" > "$folder/init.pid"
}

# Clients ask a slurmd by its port, so its process is found in the node by its name.
slurmd_of() { processes "$1" | awk '$2 ~ /(^|\/)slurmd$/ && !pid { pid = $1 } END { print pid }'; }    # reads to the end: whoever writes into a closed pipe dies

kill_daemon() { # kill_daemon NAME
  local pid
  if [ "$1" = slurmctld ]; then pid=$(cat "$place/slurmctld.pid"); else pid=$(slurmd_of "$1"); fi
  kill -9 "${pid:?$1 is not up}"
}

start_daemon() { # start_daemon NAME
  if [ "$1" = slurmctld ]; then start_controller; return; fi
  local init
  init=$(cat "$place/nodes/$1/init.pid")
  setsid nsenter --target "$init" --pid --mount --uts slurmd -D -N "$1" -f "$SLURM_CONF" >> "$place/log/node.$1.log" 2>&1 < /dev/null &
}

kill_node() {
  lives "$place/nodes/$1/init.pid" || fail "node $1 is not up"
  kill -9 "$(cat "$place/nodes/$1/init.pid")"
}

processes() { # processes NODE: pid and command of each, as this machine numbers them
  lives "$place/nodes/$1/init.pid" || return 0
  local namespace pid
  namespace=$(readlink "/proc/$(cat "$place/nodes/$1/init.pid")/ns/pid")
  for pid in /proc/[0-9]*; do
    if [ "$(readlink "$pid/ns/pid" 2> /dev/null)" = "$namespace" ]; then
      echo "${pid#/proc/} $(tr '\0' ' ' < "$pid/cmdline" 2> /dev/null)"
    fi
  done
}

send_all() { # send_all SIGNAL NODE: to all in it, and once more to what was started meanwhile
  lives "$place/nodes/$2/init.pid" || fail "node $2 is not up"
  local pid _
  for _ in 1 2 3; do
    processes "$2" | while read -r pid _; do kill "-$1" "$pid" 2> /dev/null || true; done
  done
}

all_idle() { [ "$(sinfo --noheader --Node --partition=main --states=idle,mixed,allocated | wc -l)" -eq "$1" ]; }

start() {
  local nodes=${1:-3}
  command -v slurmctld munged slurmd > /dev/null || fail "not installed: $0 install"
  [ "$(id -u)" = 0 ] || fail "nodes are namespaces, which take root: sudo $0 start"
  lives "$place/slurmctld.pid" || write_configuration "$nodes"
  start_munge
  start_controller
  for ((i = 1; i <= nodes; i++)); do boot "n$i"; done
  scontrol update nodename="n[1-$nodes]" state=resume 2> /dev/null || true    # a state of a former start may say down
  wait_for 20 all_idle "$nodes" || fail "not all nodes came up: $(sinfo --noheader --Node)"
  sinfo
  echo "to use it:  eval \"\$($0 env)\""
}

stop() {
  if lives "$place/slurmctld.pid"; then scancel --user=root || true; sleep 0.5; fi
  local file
  for file in "$place"/nodes/*/init.pid; do
    if lives "$file"; then kill -9 "$(cat "$file")"; fi
  done
  for file in "$place/slurmctld.pid" "$place/munged.pid"; do
    if lives "$file"; then kill "$(cat "$file")"; wait_for 10 eval "! lives '$file'" || true; fi
  done
}

case ${1:-} in
  install) DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge ;;
  start) start "${2:-}" ;;
  stop) stop ;;
  env) echo "export SLURM_CONF=$SLURM_CONF" ;;
  kill) kill_node "$2" ;;
  boot) boot "$2" ;;
  freeze) send_all STOP "$2" ;;
  thaw) send_all CONT "$2" ;;
  processes) processes "$2" ;;
  daemon) case $2 in kill) kill_daemon "$3" ;; start) start_daemon "$3" ;; esac ;;
  *) sed -n '2,20p' "$0"; exit 2 ;;
esac
