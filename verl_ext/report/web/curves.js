"use strict";
// The panels: drawn when they come into sight, in the colours of light or dark.

const DARK = matchMedia("(prefers-color-scheme: dark)");

function colors() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: color("--line"), zerolinecolor: color("--line-strong"), linecolor: color("--line-strong") };
  return {
    axis,
    layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--text-soft"), family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line-strong"), font: { color: color("--text") } },
    },
  };
}

function drawFigure(target, figure) {
  const { axis, layout } = colors();
  const full = { ...figure.layout, ...layout, xaxis: { ...figure.layout.xaxis, ...axis }, yaxis: { ...figure.layout.yaxis, ...axis } };
  const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
  return Plotly.react(target, figure.data, full, options);
}

async function showCurves() {
  const holder = document.getElementById("curves");
  const panels = JSON.parse(await unpack("panels"));
  const shown = new Map();
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(target);
      shown.get(target).drawn = true;
      drawFigure(target, shown.get(target).figure);
    }
  }, { rootMargin: "300px" });
  const add = (title, about, figure) => {
    const target = make("div", { className: "plot" });
    target.style.height = `${figure.layout.height}px`; // before it is drawn, or the page would jump
    const card = make("figure", {}, make("figcaption", {}, make("strong", {}, title), make("span", {}, about)), target);
    shown.set(target, { figure, drawn: false });
    holder.append(card);
    seen.observe(target);
    return { card, target };
  };
  for (const { title, about, figure } of panels) add(title, about, figure);
  DARK.addEventListener("change", () => {
    for (const [target, { figure, drawn }] of shown) if (drawn) drawFigure(target, figure);
  });
  await addAnyMetric(add, shown);
}

// Whatever else was logged, by its name.
async function addAnyMetric(add, shown) {
  const runs = JSON.parse(await unpack("metrics"));
  const names = [...new Set(runs.flatMap(({ values }) => Object.keys(values)))].sort();
  if (!names.length) return;
  const figure = { data: [], layout: { height: 270, margin: { l: 56, r: 12, t: 8, b: 40 }, hovermode: "x unified", xaxis: { title: { text: "step" } }, yaxis: {}, showlegend: runs.length > 1 } };
  const { card, target } = add("Any other number", "", figure);
  const select = make("select", { ariaLabel: "metric" }, ...names.map((name) => new Option(name)));
  const choose = () => {
    figure.data = runs.filter(({ values }) => values[select.value]).map(({ run, steps, values }) => (
      { x: steps, y: values[select.value], name: run, mode: "lines+markers", connectgaps: true, marker: { size: 4 }, type: "scatter" }));
    if (shown.get(target).drawn) drawFigure(target, figure);
  };
  select.value = names.includes("actor/pg_loss") ? "actor/pg_loss" : names[0];
  select.addEventListener("change", choose);
  card.querySelector("figcaption span").append(select);
  choose();
}
