// Hands each figure of the page to plotly, in the colours of the page. Computes nothing.
"use strict";

const PLOTLY = {
  displaylogo: false, showSendToCloud: false, responsive: true, displayModeBar: false, doubleClick: "reset",
};
const charts = (root) => [...root.querySelectorAll("figure > .chart")];

/** What all figures have in common: the font and the colours of the page (light or dark). */
function look() {
  const style = getComputedStyle(document.body), line = style.borderTopColor;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    font: { color: style.color, family: style.fontFamily, size: 13 }, hoverlabel: { font: { family: style.fontFamily } },
    xaxis: { gridcolor: line, zerolinecolor: line, linecolor: line, ticklabeloverflow: "allow", tickangle: 0 },
  };
}

function draw(chart, { xaxis: axis, ...common }) {
  const { data, layout } = chart.figure;
  const axes = { xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis } };
  return Plotly.react(chart, data, { ...common, ...layout, ...axes }, PLOTLY);
}

/** Draws all figures inside `root`; `old` holds charts of the same names to be updated in place. */
function drawAll(root, old = new Map()) {
  for (const place of charts(root)) {
    const chart = old.get(place.id) || place;
    chart.figure = JSON.parse(place.parentNode.querySelector("script").textContent);
    chart.style.height = place.style.height;
    place.replaceWith(chart);
  }
  redraw(root);
}

function redraw(root = document) {
  const common = look();
  for (const chart of charts(root)) draw(chart, common);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
addEventListener("beforeprint", () => redraw());
