"""What a model can do, as a number with its error: the folder that `invoke evaluate` leaves.

An evaluation is a folder of runs/, so its id names it wherever a run's does. Inside is a run folder
(verl_ext/runs.py) for each model that was asked, with the trajectories:

runs/<evaluation id>/
    evaluation.json      what was asked; what must be the same for an interrupted one to go on
    summary.json         the numbers, below; written at the end, also when it was interrupted: see `complete`
    problems.parquet     one row a setting and problem (results.PROBLEMS)
    samples.parquet      one row a sample (results.SAMPLES)
    lock                 held while samples are taken
    samples/             the same in parts, one file when it is done; what an interrupted evaluation goes on from
    base/, trained/      run folders: config.yaml, manifest.json, phases.jsonl, logs/, sandboxes/, and in
                         rollouts/val-<part>.parquet the trajectories (verl_ext/trajectory.py) of part <part>

A *setting* is a model and whether it has tools: `no_tools` (the base model without any), `tools` (the base model
with the recipe's) and `trained` (a checkpoint with them). Where one model alone is evaluated, it is the base.

summary.json; shares are 0 to 1; mean, pass_at_k and majority_at_k are over problems, the rest over samples that count:

    format           1; raised when a name below changes its meaning
    kind             "evaluation"
    id, created      the folder's name; ISO time of the start
    complete         whether every sample was taken, lost ones included
    seconds          that were spent on it, the time between attempts left out
    subject          name: what the user wrote; kind: checkpoint or model; run_id and step of a checkpoint, else null;
                     models: {"base": folder, "trained": folder}, those that a setting asks
    data             path and content_sha256 of the prepared file, sets: [{data_source, problems}]
    sampling         n, temperature, top_p, seed, max_prompt_tokens, max_response_tokens, max_assistant_turns,
                     max_user_turns
    statistics       resamples, seed, confidence: of every interval
    results          a list, one entry for each setting and data_source:
        setting, model           no_tools, tools or trained; base or trained
        data_source              as in the data, for example aime_2024
        problems                 with at least one sample that counts
        samples, n_valid, lost   asked for and taken; of them not lost to our infrastructure; lost
        mean, low, high          mean@k: share of right samples of each problem, over problems, and its interval
        k                        samples a problem that count in every problem: the largest k below
        pass_at_k                {"1": ..., "2": ..., "4": ..., ...}: at least one of k right (Chen et al. 2021)
        majority_at_k            likewise: the most frequent answer of k is right
        turns                    assistant turns a sample
        tool_calls               a sample
        tool_use_ratio           samples with at least one call
        tool_error_ratio         errors and time-outs among calls that ran
        parse_failure_ratio      calls that could not be read or named no tool, among all calls
        truncated_ratio          samples cut at max_response_tokens
        out_of_turns_ratio       samples that ended with a call and no turn left
        no_answer_ratio          samples in which no answer was found
        response_tokens          {mean, p50, p95, max}: tool output included
        model_tokens             mean: what the model wrote itself
        verdicts                 {verdict: samples}, see recipe/retool/README.md
    differences      a list, one for each two settings and data_source: data_source, from, to, problems, difference
                     (mean of `to` minus mean of `from`, problem by problem), low, high

A sample that our infrastructure lost is in no number but `samples` and `lost`; it is taken again up to
`verl_ext.validation_retries` times, and again when the same evaluation is started again.
"""
