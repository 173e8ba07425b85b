// Hands each figure of the page to plotly, in the colours of the page; lays out what depends on its width.
"use strict";

const PLOTLY = {
  displaylogo: false, showSendToCloud: false, responsive: true, displayModeBar: false, doubleClick: "reset",
};
const CHARACTER_PX = 8, TICK_PX = 50, LEGEND_PX = 19; // of a label on average, of a number with its unit, of a row
const OF_PAGE = /"#(333333|e9e9e9|ffffff)"/g; // marks in the colors of text, of what is empty, of paper
const PREFIXES = ["p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E"];
const range = (first, last) => Array.from({ length: Math.max(last - first + 1, 0) }, (_, i) => first + i);
const DIGITS = [...[0.1, 0.2, 0.5, 1].map((step) => range(0, Math.round(9 / step) - 1).map((i) => 1 + i * step)), [1, 2, 5], [1]];
const charts = () => [...document.querySelectorAll("figure > .chart")];

/** What all figures have in common: the font and the colours of the page (light or dark). */
function look() {
  const style = getComputedStyle(document.body), line = style.borderTopColor;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", maxheight: 900 },
    own: { 333333: style.color, e9e9e9: line, ffffff: style.backgroundColor },
    font: { color: style.color, family: style.fontFamily, size: 13 }, hoverlabel: { font: { family: style.fontFamily } },
    xaxis: { gridcolor: line, zerolinecolor: line, linecolor: line, ticklabeloverflow: "allow", tickangle: 0 },
  };
}

let common = null;

/** Round numbers between two ends, as close as there is room: `most` would fill it. */
function logTicks(low, high, most) {
  const powers = range(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)));
  let found = [];
  for (const digits of DIGITS) {
    found = powers.flatMap((power) => digits.map((digit) => digit * 10 ** power)).filter((tick) => tick >= low && tick <= high);
    if (found.every((tick, i) => !i || most * Math.log(tick / found[i - 1]) >= Math.log(high / low))) break;
  }
  return found.filter((_, i) => i % Math.ceil(found.length / most) === 0);
}

/** `value` with an SI prefix and its unit. */
function withUnit(value, unit) {
  const power = Math.floor(Math.log10(value) / 3 + 1e-9);
  return `${+(value / 1000 ** power).toPrecision(3)}${PREFIXES[power + 4] ?? `e${3 * power}`}${unit}`;
}

/** Where numbers stand on an axis; between powers of ten plotly shows a digit alone, without its unit. */
function ticks(axis, values, most) {
  if (axis.type === "category" || axis.tickvals) return {};
  if (axis.type !== "log" || axis.exponentformat) return { nticks: most };
  const logs = axis.range || values.filter((value) => value > 0).map(Math.log10);
  const [low, high] = logs.reduce(([low, high], log) => [Math.min(low, log), Math.max(high, log)], [Infinity, -Infinity]);
  const tickvals = low <= high ? logTicks(10 ** low, 10 ** high, most) : [];
  if (!tickvals.length) return {};
  return axis.tickformat === "~s" ? { tickvals, ticktext: tickvals.map((value) => withUnit(value, axis.ticksuffix)) } : { tickvals };
}

/** Room for the labels of the axes and a row of the legend, so that plotly need not measure them; long names are cut. */
function margins(data, { xaxis, yaxis, showlegend }, width) {
  const names = [...new Set(data.flatMap((trace) => trace.y || []))].filter((name) => typeof name === "string");
  const widest = Math.max(...names.map((name) => name.length), 0), room = width / CHARACTER_PX;
  const most = widest > 0.7 * room ? Math.floor(room / 2) : widest;
  const cut = (name) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);
  if (most < widest) Object.assign(yaxis, { tickvals: names, ticktext: names.map(cut) });
  return { l: Math.max(yaxis.title ? 76 : 48, 14 + CHARACTER_PX * most), r: 24, t: showlegend ? 32 : 8, b: xaxis.title ? 48 : 28 };
}

/** Draws the figure that stands beside `chart`, or what has changed of it; more rows of a legend make it higher. */
function draw(chart) {
  const { xaxis: axis, own: colors, ...rest } = (common ??= look());
  const text = chart.nextElementSibling.textContent.replace(OF_PAGE, (_, color) => `"${colors[color]}"`);
  const { data, layout } = JSON.parse(text);
  const { height } = layout, width = chart.clientWidth, margin = margins(data, layout, width), { l, r, t, b } = margin;
  for (const [name, room] of [["x", width - l - r], ["y", height - t - b]]) {
    const values = data.flatMap((trace) => trace[name] || []), own = layout[`${name}axis`];
    layout[`${name}axis`] = { ...axis, ...ticks(own, values, Math.max(Math.floor(room / TICK_PX), 2)), ...own };
  }
  const drawn = Plotly.react(chart, data, { ...rest, ...layout, margin, width }, PLOTLY);
  const rows = new Set([...chart.querySelectorAll(".legend .traces")].map((one) => Math.round(one.getBoundingClientRect().top)));
  const above = LEGEND_PX * Math.max(rows.size - 1, 0);
  chart.style.height = `${height + above}px`;
  return above ? Plotly.relayout(chart, { "margin.t": t + above, height: height + above }) : drawn;
}

/** Draws all figures, in the colours that the page has now. */
function redraw() {
  common = null;
  charts().forEach(draw);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("beforeprint", redraw);
let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => charts().filter((chart) => chart.on).forEach(draw), 200);
});
