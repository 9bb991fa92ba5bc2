"""The fixed parts of the report page: markup, style and script. No value of a run is in here."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:">
<title><!--TITLE--></title>
<style><!--STYLE--></style>
</head>
<body>
<main>
<!--BODY-->
<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>
</main>
<script type="application/json" id="palette"><!--PALETTE--></script>
<script type="application/json" id="figures"><!--FIGURES--></script>
<script><!--PLOTLY--></script>
<script><!--SCRIPT--></script>
</body>
</html>
"""

STYLE = """
:root { --page: #f6f7f9; --card: #ffffff; --text: #24292f; --muted: #667079; --line: #e3e6ea;
  --good: #12735f; --bad: #b3372b; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161b; --card: #1b2128; --text: #d9dde3; --muted: #929aa5; --line: #2c333b;
    --good: #4cc5ac; --bad: #ff8b7d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 56px; }
header { margin-bottom: 24px; }
h1 { font-size: 28px; line-height: 1.2; font-weight: 600; margin: 0 0 4px; }
h2 { font-size: 16px; font-weight: 600; margin: 0; }
.kicker { margin: 0 0 4px; color: var(--muted); font-size: 13px; }
.result { margin: 0 0 20px; font-size: 16px; }
.muted, figcaption p { color: var(--muted); }
.good { color: var(--good); }
.bad { color: var(--bad); }
dl { display: flex; flex-wrap: wrap; gap: 12px 28px; margin: 0; }
dt { color: var(--muted); font-size: 12px; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
section, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 18px 20px; margin: 0; min-width: 0; }
section { margin: 16px 0; }
section h2 { margin-bottom: 10px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.wide { grid-column: 1 / -1; }
figcaption p { margin: 2px 0 6px; font-size: 13px; }
.plot { width: 100%; height: 300px; }
.wide .plot { height: 340px; }
.scroll { overflow: auto; max-height: 420px; }
table { border-collapse: collapse; width: 100%; min-width: 680px; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: var(--card); color: var(--muted); font-weight: 500;
  text-align: left; }
th, td { padding: 6px 18px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; }
ul { margin: 0; padding-left: 20px; }
@media (max-width: 800px) { .grid { grid-template-columns: minmax(0, 1fr); }
  main { padding: 20px 12px 40px; } section, .card { padding: 14px 12px; } }
@media print { body { background: none; } .scroll { max-height: none; overflow: visible; }
  .card { break-inside: avoid; } }
"""

SCRIPT = """
(function () {
  'use strict';
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read('figures');
  const palette = read('palette');
  const dark = window.matchMedia('(prefers-color-scheme: dark)');

  function resolve(value, scheme) {
    if (typeof value === 'string' && value[0] === '@') {
      const name = value.slice(1);
      return Object.hasOwn(palette, name) ? palette[name][scheme] : value;
    }
    if (Array.isArray(value)) return value.map((v) => resolve(v, scheme));
    if (value === null || typeof value !== 'object') return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolve(v, scheme)]));
  }

  function themed(layout) {
    const axis = (own) => Object.assign({ gridcolor: '@grid', zeroline: false, linecolor: '@grid',
      automargin: true, tickfont: { color: '@muted' } }, own,
      { title: Object.assign({ standoff: 8, font: { color: '@muted', size: 12 } }, own.title) });
    return Object.assign({}, layout, {
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', autosize: true,
      margin: { l: 52, r: 12, t: 34, b: 44 },
      font: { family: 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif', size: 12,
        color: '@text' },
      legend: { orientation: 'h', x: 0, y: 1.02, xanchor: 'left', yanchor: 'bottom' },
      hoverlabel: { font: { size: 12 } },
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis) });
  }

  function draw() {
    const scheme = dark.matches ? 1 : 0;
    return Promise.all(figures.map((f) => Plotly.react(f.id, resolve(f.data, scheme),
      resolve(themed(f.layout), scheme), { responsive: true,
        displayModeBar: false })));
  }

  draw().then(() => {
    document.body.dataset.drawn = String(document.querySelectorAll('.plot .main-svg').length);
    document.body.dataset.height = String(document.documentElement.scrollHeight);
  });
  dark.addEventListener('change', draw);
})();
"""
