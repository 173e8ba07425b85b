// Hands each figure of the page to plotly, in the colours of the page. Computes nothing.
"use strict";

const PLOTLY = {
  displaylogo: false, showSendToCloud: false, responsive: true, displayModeBar: false, doubleClick: "reset",
};
const charts = () => [...document.querySelectorAll("figure > .chart")];

/** What all figures have in common: the font and the colours of the page (light or dark). */
function look() {
  const style = getComputedStyle(document.body), line = style.borderTopColor;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    font: { color: style.color, family: style.fontFamily, size: 13 }, hoverlabel: { font: { family: style.fontFamily } },
    xaxis: { gridcolor: line, zerolinecolor: line, linecolor: line, ticklabeloverflow: "allow", tickangle: 0 },
  };
}

let common = null;

/** Draws the figure that stands beside `chart`, or what has changed of it. */
function draw(chart) {
  const { data, layout } = JSON.parse(chart.nextElementSibling.textContent), { xaxis: axis, ...rest } = (common ??= look());
  const axes = { xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis } };
  return Plotly.react(chart, data, { ...rest, ...layout, ...axes }, PLOTLY);
}

/** Draws all figures, in the colours that the page has now. */
function redraw() {
  common = null;
  charts().forEach(draw);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("beforeprint", redraw);
