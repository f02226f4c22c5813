"""How a run's page looks: one column on a phone, dark where the reader's screen is."""

STYLE = """
:root { --ink: #1a1d21; --quiet: #5b6470; --paper: #f7f8fa; --card: #fff; --line: #dfe3e8;
  --accent: #2457c5; --good: #15803d; --bad: #c02626; --mark: #fff3c4;
  --c0: #2457c5; --c1: #d9480f; --c2: #0b7a4b; --c3: #8b3fc7; --c4: #b0217c; --c5: #6b6300; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7eaee; --quiet: #9aa4b1; --paper: #121417; --card: #1b1f24; --line: #30363e;
    --accent: #7aa5ff; --good: #4ade80; --bad: #ff7b72; --mark: #4a3f10;
    --c0: #7aa5ff; --c1: #ff9a62; --c2: #53d49a; --c3: #c99bff; --c4: #ff8ac6; --c5: #d8cd5a; } }
* { box-sizing: border-box; }
html { color-scheme: light dark; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header, main, footer { max-width: 1180px; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 2rem; } footer { padding: 1rem 1rem 3rem; color: var(--quiet); }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .25rem 0 .75rem; } .quiet, caption, figcaption { color: var(--quiet); }
code, pre, .key { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  font-size: .86em; }
.key { white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); margin: .5rem 0;
  border: 1px solid var(--line); border-radius: 10px; padding: .75rem 1rem; }
.badge { display: inline-block; border-radius: 99px; padding: .1rem .7rem; font-weight: 600;
  font-size: .85rem; border: 1px solid currentColor; color: var(--quiet); }
.badge.finished { color: var(--good); } .badge.failed, .badge.hung { color: var(--bad); }
.badge.running { color: var(--accent); }
.reason { color: var(--bad); overflow-wrap: anywhere; }
dl.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .75rem;
  margin: 1.25rem 0; }
dl.cards div, figure.chart { background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; padding: .8rem 1rem; }
dl.cards dt { color: var(--quiet); font-size: .85rem; }
dl.cards dd { margin: 0; font-size: 1.45rem; font-weight: 650; line-height: 1.25;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
dl.cards dd.more { font-size: .85rem; font-weight: 400; color: var(--quiet); }
.beside { display: flex; flex-wrap: wrap; gap: 0 2rem; align-items: flex-start; }
.beside section { min-width: 0; max-width: 100%; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr));
  gap: .75rem; }
figure { margin: 0; } figure.chart h3 { margin: 0 0 .25rem; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--quiet); font-size: 12px; }
svg .grid { stroke: var(--line); } svg polyline { fill: none; stroke-width: 2;
  stroke-linejoin: round; }
svg .thin { stroke-width: 1.25; } svg .dashed { stroke-dasharray: 5 4; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .85rem; }
.legend svg { display: inline-block; width: 22px; height: 10px; margin-right: .35rem; }
.wide { width: fit-content; max-width: 100%; overflow-x: auto; border: 1px solid var(--line);
  border-radius: 10px; margin: .5rem 0; background: var(--card); }
.wide:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; min-width: min(100%, 26rem); font-size: .9rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .6rem .75rem .3rem; }
th, td { text-align: left; padding: .35rem .75rem; border-top: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; min-width: 3ch; }
thead th { color: var(--quiet); font-weight: 600; overflow-wrap: normal; }
tbody th { font-weight: 500; }
td.number, th.number { text-align: right; white-space: nowrap; }
th.number { color: var(--quiet); }
tr.changed th, tr.changed td { background: var(--mark); }
.bar { display: inline-block; width: 7rem; height: .6rem; border-radius: 9px;
  vertical-align: middle;
  background: linear-gradient(to right, var(--accent) var(--v), var(--line) var(--v)); }
table.matrix { min-width: 0; margin: 0 .75rem .75rem; }
table.matrix th, table.matrix td { padding: .3rem .4rem; text-align: center; border: 0;
  max-width: 11rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
table.matrix caption { padding-left: 0; } table.matrix thead th { vertical-align: bottom; }
table.matrix tbody th { text-align: right; position: sticky; left: 0; background: var(--card); }
table.matrix .corner { white-space: normal; font-size: .8rem; max-width: 5.5rem; }
table.matrix td { min-width: 2.6rem;
  border: 1px solid var(--card); border-radius: 6px; }
table.matrix .long { writing-mode: vertical-rl; max-height: 10rem; display: inline-block;
  transform: rotate(180deg); text-align: left; }
table.matrix td.right { background: color-mix(in srgb, var(--good) var(--v), transparent); }
table.matrix td.wrong { background: color-mix(in srgb, var(--bad) var(--v), transparent); }
table.matrix td.none { color: color-mix(in srgb, var(--quiet) 55%, transparent); }
ul.pictures { list-style: none; margin: 0; padding: 0; display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(138px, 1fr)); }
ul.pictures li { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  overflow: hidden; font-size: .85rem; }
ul.pictures img, ul.pictures .gone { display: block; width: 100%; aspect-ratio: 1;
  object-fit: contain; background: color-mix(in srgb, var(--line) 50%, transparent); }
ul.pictures .gone { padding: 1rem; } ul.pictures div { padding: .5rem .65rem; }
ul.pictures div span { display: block; overflow-wrap: anywhere; }
.right { color: var(--good); } .wrong { color: var(--bad); }
table.matrix .right, table.matrix .wrong { color: inherit; }
details { margin: .5rem 0; } summary { cursor: pointer; padding: .25rem 0; font-weight: 600; }
@media print { details { display: none; } }
"""
