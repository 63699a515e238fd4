"use strict";
/* Draws the charts that stand as JSON in the page, sorts tables, and switches between light and dark. */
(() => {
  const reached = (state) => { performance.mark(state); document.documentElement.dataset.state = state; };
  const page = JSON.parse(document.getElementById("charts").textContent);
  const lookOf = (index) => page.looks[index] || { colour: 6, marker: "circle", hollow: false };
  const root = document.documentElement;
  const asked = matchMedia("(prefers-color-scheme: dark)");

  // --- light and dark

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : asked.matches);
  const store = {
    get: () => { try { return localStorage.getItem("phalanx-theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("phalanx-theme", value); } catch { /* a file may have no storage */ } },
  };
  const button = document.getElementById("theme");

  function paint() {
    const colours = isDark() ? page.palette.dark : page.palette.light;
    colours.forEach((colour, index) => root.style.setProperty(`--c${index}`, colour));
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
    button.setAttribute("aria-pressed", String(isDark()));
  }

  function theme() {
    const style = getComputedStyle(root);
    const value = (name) => style.getPropertyValue(name).trim();
    return {
      colours: isDark() ? page.palette.dark : page.palette.light,
      ink: value("--ink"), soft: value("--soft"), grid: value("--grid"), card: value("--card"), line: value("--line"),
      font: getComputedStyle(document.body).fontFamily,
    };
  }

  // --- charts

  // Plotly reads some HTML and its own %{…} in texts: names are neither.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/%/g, "&#37;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const hover = (lines) => lines.map((line, index) => (index ? plain(line) : `<b>${plain(line)}</b>`)).join("<br>");
  const faded = (colour, share) => colour + Math.round(share * 255).toString(16).padStart(2, "0");
  const present = (values) => values.some((value) => value !== null);
  const narrow = (div) => div.clientWidth < 420;

  function errors(curve, values, colour) {
    if (!present(curve.high)) return undefined;
    return {
      type: "data", symmetric: false, color: colour, thickness: 1.4, width: 4,
      array: values.map((value, index) => (curve.high[index] === null ? 0 : curve.high[index] - value)),
      arrayminus: values.map((value, index) => (curve.low[index] === null ? 0 : value - curve.low[index])),
    };
  }

  function marker(look, colour, style, size = 9) {
    return {
      symbol: look.marker, size, color: look.hollow ? style.card : colour, line: { color: colour, width: 2 },
    };
  }

  function lineTraces(chart, style) {
    const traces = [];
    for (const curve of chart.curves) {
      const look = lookOf(curve.look);
      const colour = curve.look === null ? style.soft : style.colours[look.colour];
      const trace = {
        type: "scatter", name: plain(curve.name), x: curve.x, y: curve.y, text: curve.text.map(hover),
        hovertemplate: "%{text}<extra></extra>", meta: { kind: curve.kind },
      };
      if (curve.kind === "measured" || curve.kind === "aside") {
        Object.assign(trace, {
          mode: curve.kind === "aside" || chart.forecast ? "markers" : "lines+markers",
          marker: marker(curve.kind === "aside" ? { ...look, hollow: true } : look, colour, style),
          line: { color: colour, width: 2.2, dash: look.hollow ? "dash" : "solid" },
          error_y: errors(curve, curve.y, colour),
        });
      } else if (curve.kind === "forecast") {
        if (present(curve.high)) {
          traces.push({
            type: "scatter", x: [...curve.x, ...[...curve.x].reverse()], y: [...curve.high, ...[...curve.low].reverse()],
            fill: "toself", fillcolor: faded(colour, 0.18), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
            showlegend: false, name: `${plain(curve.name)}, band`, meta: { kind: "band" },
          });
        }
        Object.assign(trace, { mode: "lines", line: { color: colour, width: 2, dash: look.hollow ? "dash" : "solid" } });
      } else {
        const dash = curve.kind === "wanted" ? "dot" : "longdash";
        Object.assign(trace, { mode: "lines", line: { color: style.soft, width: 1.5, dash } });
      }
      traces.push(trace);
    }
    return traces;
  }

  function rowTraces(chart, style) {
    return chart.parts.map((part) => {
      const labelled = part.colour === null;
      const looks = chart.rows.map((row) => lookOf(row.look));
      const colours = labelled ? looks.map((look) => style.colours[look.colour]) : style.colours[part.colour];
      const trace = {
        name: plain(part.name), x: part.x, y: chart.rows.map((row) => row.at), orientation: "h",
        hovertext: part.text.map(hover), hovertemplate: "%{hovertext}<extra></extra>", meta: { kind: chart.kind },
      };
      const bars = errors(part, part.x, style.ink);
      if (chart.kind === "dots") {
        const symbols = looks.map((look) => look.marker);
        return {
          ...trace, type: "scatter", mode: "markers", marker: { symbol: symbols, size: 10, color: colours }, error_x: bars && { ...bars, color: style.soft },
        };
      }
      return {
        ...trace, type: "bar", width: 0.7, error_x: bars, marker: { color: colours, line: { color: style.card, width: 1 } },
        ...(chart.kind === "stack" && {
          text: part.x.map((value) => (value !== null && value >= 9 ? `${Math.round(value)}%` : "")),
          textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "none",
          insidetextfont: { color: isDark() ? "#0d1117" : "#ffffff", size: 11 },
        }),
      };
    });
  }

  const axis = (style, title) => ({
    title: { text: plain(title), standoff: 8, font: { size: 13, color: style.soft } },
    gridcolor: style.grid, linecolor: style.line, zerolinecolor: style.line, tickcolor: style.line, ticks: "outside", ticklen: 4,
    tickfont: { size: 12 }, automargin: true, fixedrange: false,
  });

  function layout(chart, style, div) {
    const common = {
      font: { family: style.font, size: 12, color: style.ink }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 52, r: 14, t: 8, b: 44 }, hovermode: "closest", dragmode: false, hoverdistance: 30, barmode: "stack",
      hoverlabel: { bgcolor: style.card, bordercolor: style.line, font: { family: style.font, color: style.ink, size: 13 }, align: "left" },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 12 }, itemsizing: "constant", bgcolor: "rgba(0,0,0,0)" },
    };
    return chart.rows ? rowLayout(chart, style, common, div) : lineLayout(chart, style, common);
  }

  function lineLayout(chart, style, common) {
    const places = chart.curves.flatMap((curve) => curve.x);
    const [low, high] = [Math.min(...places), Math.max(...places)];
    const pad = (high - low || 1) * 0.06;
    const y = { ...axis(style, chart.y_title), range: chart.log ? chart.y_range.map(Math.log10) : chart.y_range };
    if (chart.log) {
      Object.assign(y, { type: "log", tickvals: chart.y_ticks.map((tick) => tick[0]), ticktext: chart.y_ticks.map((tick) => tick[1]) });
    }
    return {
      ...common,
      xaxis: {
        ...axis(style, chart.x_title), range: [low - pad, high + pad], zeroline: false, showgrid: false,
        tickvals: chart.x_ticks.map((tick) => tick[0]), ticktext: chart.x_ticks.map((tick) => plain(tick[1])),
      },
      yaxis: y,
    };
  }

  function rowLayout(chart, style, common, div) {
    const least = chart.rows[0].at, most = chart.rows[chart.rows.length - 1].at;
    const x = { ...axis(style, chart.x_title), zeroline: chart.kind !== "dots" };
    if (chart.kind === "stack") x.range = [0, 100];
    else if (chart.kind === "bars") x.rangemode = "tozero";
    const most_letters = narrow(div) ? 18 : 30;
    return {
      ...common, xaxis: x, showlegend: chart.kind === "stack",
      legend: { ...common.legend, traceorder: "normal" },
      yaxis: {
        ...axis(style, ""), range: [most + 0.6, least - 0.6], showgrid: false, zeroline: false, ticks: "",
        tickvals: chart.rows.map((row) => row.at), ticktext: chart.rows.map((row) => plain(short(row.text, most_letters))),
      },
      shapes: chart.reference === null ? [] : [{
        type: "line", xref: "x", yref: "paper", x0: chart.reference, x1: chart.reference, y0: 0, y1: 1, layer: "below",
        line: { color: style.soft, width: 1.5, dash: "longdash" },
      }],
    };
  }

  const short = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 11)}…${text.slice(-10)}`);

  const config = {
    responsive: true, displaylogo: false, // Without a pointer that hovers the bar would stay, over the legend.
    displayModeBar: matchMedia("(hover: hover)").matches && "hover", scrollZoom: false, doubleClick: "reset",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], toImageButtonOptions: { format: "svg" },
  };

  const drawn = new Set();
  function draw(div) {
    const chart = page.charts[div.dataset.chart], style = theme();
    const traces = chart.rows ? rowTraces(chart, style) : lineTraces(chart, style);
    drawn.add(div);
    return Plotly.react(div, traces, layout(chart, style, div), { ...config, toImageButtonOptions: { format: "svg", filename: chart.key } });
  }

  const divs = [...document.querySelectorAll("[data-chart]")];
  const drawRest = () => {
    document.body.classList.remove("large");
    divs.filter((div) => !drawn.has(div)).forEach(draw);
  };
  const queue = []; // one chart a task, so that clicks are answered between them
  function drawNext() {
    const div = queue.shift();
    if (!div) return void reached("drawn");
    if (!drawn.has(div)) draw(div);
    setTimeout(drawNext);
  }
  const seen = new IntersectionObserver((entries) => {
    const near = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
    near.forEach((div) => seen.unobserve(div));
    if (queue.push(...near) === near.length) setTimeout(drawNext);
  }, { rootMargin: "150px" });

  // --- tables

  const key = (cell) => {
    const value = cell && cell.dataset.value;
    if (value === undefined) return cell ? cell.textContent : "";
    return value === "" ? null : Number(value);
  };

  function compare(one, other) {
    if (typeof one === "number" && typeof other === "number") return one - other;
    return String(one).localeCompare(String(other), "en", { numeric: true });
  }

  function sortBy(head) {
    const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending";
    const rows = [...body.rows].map((row) => [key(row.cells[column]), row]);
    rows.sort(([one], [other]) => {
      if (one === null || other === null) return (one === null) - (other === null); // what isn't known stays last
      return down ? compare(other, one) : compare(one, other);
    });
    body.append(...rows.map(([, row]) => row));
    for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  }

  for (const head of document.querySelectorAll("th[data-sort]")) {
    const sorter = document.createElement("button");
    sorter.type = "button";
    sorter.append(...head.childNodes);
    head.append(sorter);
  }

  // --- start

  const chosen = store.get();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  paint();
  button.hidden = false;
  const redraw = () => { paint(); drawn.forEach(draw); };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    store.set(root.dataset.theme);
    redraw();
  });
  asked.addEventListener("change", redraw);
  document.addEventListener("click", (event) => {
    const head = event.target.closest("th[data-sort]");
    if (head) sortBy(head);
  });
  addEventListener("beforeprint", drawRest);
  document.addEventListener("DOMContentLoaded", () => { // by then Plotly, which comes after this, is there
    reached("ready"); // tables and buttons answer; "drawn": so do the plots in view
    if (divs.length) divs.forEach((div) => seen.observe(div));
    else reached("drawn");
  });
})();
