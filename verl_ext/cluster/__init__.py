"""Training on a Ray cluster of several machines: started, looked at, and given a run through Ray's own Jobs API.

    start    `invoke cluster-head`, `cluster-join`, `cluster-status`, `cluster-stop`: `ray start` with our environment
    launch   `invoke launch`: the nodes are looked at in one job, the run is another; its log, its end, its exit status
    jobs     what is asked of Ray's Jobs API
    look     in the first job: waits for nodes, compares them, says what would fail and on which
      nodes, on_node, facts, compare    who is there; what runs on each; what it says of itself; the differences
    shape    in the second job: how many nodes and GPUs the run has, which no file says twice

Secrets are in none of these: each node's processes read their own environment or env file.
"""
