"""Launcher ray: `python -m phalanx.ray_launch OPTIONS -- phalanx.worker SCRIPT…` runs once on each node of a launch.

agent.py    that process: starts this node's Ray, watches it, and leaves nothing behind
node.py     what `ray start` is told: ports, CPUs and GPUs, folders
meeting.py  how the other nodes' agents find the first one, and learn that all is over
driver.py   on the first node: waits for all nodes, then Ray Train with a worker for each rank
rank.py     in a Ray Train worker: becomes a rank by starting the script as a process of its own
ranks.py    in the agent: hands its terminal and environment to those processes, and keeps an eye on them
"""
