// Hands each figure of the page to plotly, in the colours of the page. Computes nothing.
"use strict";

const PLOTLY = {
  displaylogo: false, showSendToCloud: false, responsive: true, displayModeBar: false, doubleClick: "reset",
};

/** The figure's own layout over the colours of the page, taken from computed styles (light or dark). */
function themed(layout, chart) {
  const style = getComputedStyle(chart), font = { color: style.color, family: style.fontFamily, size: 13 };
  const axis = {
    gridcolor: style.borderTopColor, zerolinecolor: style.borderTopColor, linecolor: style.borderTopColor,
    automargin: true,
  };
  const out = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font, margin: { l: 10, r: 10, t: 10, b: 10 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, hoverlabel: { font: { family: style.fontFamily } },
    ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
  };
  for (const key of Object.keys(layout)) if (/^[xy]axis\d/.test(key)) out[key] = { ...axis, ...layout[key] };
  return out;
}

function draw(chart) {
  const { data, layout } = chart.figure;
  return Plotly.react(chart, data, themed(layout, chart), PLOTLY);
}

/** Charts that changed: drawn again once the words are on the screen, and those out of sight when they come near. */
const changed = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    changed.unobserve(target);
    draw(target);
  }
}, { rootMargin: "25%" });

/** Draws all figures inside `root`; `old` holds charts of the same names to be updated in place. */
function drawAll(root, old = new Map()) {
  return Promise.all([...root.querySelectorAll("figure > .chart")].map((place) => {
    const chart = old.get(place.id) || place;
    chart.figure = JSON.parse(place.parentNode.querySelector("script").textContent);
    chart.style.height = place.style.height;
    if (chart === place) return draw(chart);
    place.replaceWith(chart);
    return changed.observe(chart);
  }));
}

const redraw = () => document.querySelectorAll("figure > .chart").forEach((chart) => chart.figure && draw(chart));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("beforeprint", redraw);
