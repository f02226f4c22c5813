from vil.ops import Case, Window, autotune, choices

case = Case(Window((56, 56), 7), batch=2, heads=3, head_dim=32, num_global=1, table_bias=True, global_bias=True)
trials = autotune.tune(case, ["blocked", "chunk_handgrad", "gathered"], rounds=3)
for trial in trials:
    print(trial.name, trial.reason or f"{1e3 * trial.seconds:.1f} ms")
choices.save("cpu", {case.bucket(): trials})       # choices.load("cpu") takes it up in another process
