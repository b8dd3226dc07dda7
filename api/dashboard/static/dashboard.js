// Small deeds of every page: copying, charts, and the moment after a part of the page was replaced.
"use strict";

(() => {
  const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const UNITS = {
    cost: { scale: 1e9, text: (value) => "$" + decimal(value, value !== 0 && value < 0.01 ? 9 : 2) },
    neurons: { scale: 1e6, text: (value) => decimal(value, value < 10 ? 1 : 0) + " neurons" },
    tokens: { scale: 1, text: (value) => decimal(value, 0) + " tokens" },
    requests: { scale: 1, text: (value) => decimal(value, 0) + " requests" },
    pages: { scale: 1, text: (value) => decimal(value, 0) + " pages" },
    rate: { scale: 1, text: (value) => decimal(value, 1) + " /s" },
  };

  function decimal(value, digits) {
    return value.toLocaleString("en-US", { minimumFractionDigits: digits === 9 ? 0 : digits, maximumFractionDigits: digits });
  }

  function axisText(unit, value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    const short = size >= 1e9 ? decimal(value / 1e9, 1) + " B" : size >= 1e6 ? decimal(value / 1e6, 1) + " M"
      : size >= 1e4 ? decimal(value / 1e3, 0) + " k" : String(Number(value.toPrecision(6)));
    if (unit !== "cost") return short;
    return "$" + (size < 0.01 ? value.toFixed(9).replace(/0+$/, "") : size < 1e4 ? decimal(value, 2) : short);
  }

  // All times are UTC, wherever the browser is.
  function stepText(seconds, step) {
    const text = new Date(seconds * 1000).toISOString();
    return step >= 86400 ? text.slice(0, 10) : text.slice(0, 16).replace("T", " ") + " UTC";
  }

  // The day where steps are days, or where a new one begins; the time of day elsewhere.
  function axisTime(seconds, before, step) {
    const text = new Date(seconds * 1000).toISOString();
    const day = text.slice(5, 10);
    if (step >= 86400) return text.slice(11, 16) === "00:00" ? day : "";
    const time = step < 60 ? text.slice(11, 19) : text.slice(11, 16);
    return before !== undefined && new Date(before * 1000).toISOString().slice(5, 10) === day ? time : day + " " + time;
  }

  function stacked(bands, scale) {
    const sums = [];
    let below = null;
    for (const band of bands) {
      const values = band.values.map((value, index) => value / scale + (below ? below[index] : 0));
      sums.push(values);
      below = values;
    }
    return sums;
  }

  function draw(holder) {
    const source = document.getElementById(holder.dataset.chart);
    if (!source || typeof uPlot === "undefined") return;
    const chart = JSON.parse(source.textContent);
    if (holder.plot) { holder.plot.destroy(); holder.plot = null; }
    if (chart.bands.length === 0 || chart.steps.length < (chart.lines ? 2 : 1)) return;
    const unit = UNITS[chart.unit];
    const sums = chart.lines ? chart.bands.map((band) => band.values.map((v) => (v === null ? null : v / unit.scale))) : stacked(chart.bands, unit.scale);
    const order = chart.bands.map((_, index) => index);
    if (!chart.lines) order.reverse(); // the tallest is drawn first, and the others over it
    const fill = (index) => colour(chart.bands[index].colour || (chart.bands[index].name.startsWith("Other") ? "--c9" : COLOURS[index % COLOURS.length]));
    const bars = uPlot.paths.bars({ size: [0.72, 46], radius: 0.12 });
    const grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: colour("--muted"), grid, ticks: { show: false }, font: "12px Inter, system-ui, sans-serif" };
    const readout = document.getElementById(holder.dataset.chart + "-readout");
    const half = chart.step_s / 2;
    holder.plot = new uPlot({
      width: holder.clientWidth,
      height: holder.clientHeight,
      legend: { show: false },
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      scales: {
        x: { time: !chart.ahead, range: (_, from, to) => (chart.lines ? [from, to] : [from - half, to + half]) },
        y: { range: (_, from, to) => [0, to > 0 ? to * 1.08 : 1] },
      },
      axes: [
        { ...axis, size: 32, grid: { show: false }, space: 84, values: (_, steps) => steps.map((seconds, index) => chart.ahead ? "+" + decimal(seconds, seconds < 10 && seconds % 1 ? 1 : 0) + " s" : axisTime(seconds, steps[index - 1], chart.step_s)) },
        { ...axis, size: 64, values: (_, values) => values.map((value) => axisText(chart.unit, value)) },
      ],
      cursor: { points: { show: false }, drag: { x: false, y: false }, y: false },
      series: [{}].concat(order.map((index) => (chart.lines
        ? { stroke: fill(index), width: 2, points: { show: false }, spanGaps: false }
        : { fill: fill(index), width: 0, paths: bars, points: { show: false } }))),
      hooks: {
        setCursor: [(plot) => {
          const at = plot.cursor.idx;
          if (!readout) return;
          if (at === null || at === undefined || chart.steps[at] === undefined) { readout.textContent = readout.dataset.idle; return; }
          const parts = chart.bands.map((band) => [band.name, band.values[at]]).filter(([, value]) => value)
            .map(([name, value]) => name + " " + unit.text(value / unit.scale));
          readout.textContent = (chart.ahead ? "in " + decimal(chart.steps[at], 1) + " s" : stepText(chart.steps[at], chart.step_s)) + ": " + (parts.join(" · ") || "nothing");
        }],
      },
    }, [chart.steps].concat(order.map((index) => sums[index])), holder);
  }

  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.plot && target.clientWidth !== target.plot.width) target.plot.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });

  function drawAll(root) {
    for (const holder of root.querySelectorAll("[data-chart]")) { draw(holder); watcher.observe(holder); }
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = before; }, 1500);
  });

  // A part that was replaced brings its own data.
  document.addEventListener("htmx:after:swap", () => drawAll(document));
  document.addEventListener("htmx:sse:before:connection", () => mark("on"));
  document.addEventListener("htmx:sse:error", () => mark("lost"));
  document.addEventListener("htmx:sse:close", () => mark("lost"));
  function mark(state) {
    for (const one of document.querySelectorAll(".live")) one.dataset.state = state;
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(document));
  document.fonts.ready.then(() => drawAll(document));
  for (const one of document.querySelectorAll("[data-needs-scripts]")) one.hidden = false;
})();
