(() => {
  "use strict";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const hidden = new Set(); // "section/place" of each run that is not shown
  const inks = {
    light: { text: "#59616b", grid: "#e9eae6", line: "#b9bdb8", card: "#ffffff", ink: "#1b1f24" },
    dark: { text: "#a0a8b2", grid: "#262c33", line: "#4a525b", card: "#171b20", ink: "#e7e9ec" },
  };
  const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");

  function traces(figure, name) {
    return figure.data.map((trace) => {
      const colour = trace.meta[name];
      const shown = !hidden.has(`${figure.section}/${trace.meta.place}`);
      const edge = trace.type === "bar" ? { line: { color: inks[name].card, width: 1 } } : {};
      return {
        ...trace,
        visible: shown,
        line: trace.line && { ...trace.line, color: colour },
        marker: { ...trace.marker, ...edge, color: colour },
      };
    });
  }

  function layout(figure, name) {
    const ink = inks[name];
    const axis = (own) => ({
      automargin: true, gridcolor: ink.grid, linecolor: ink.line, tickcolor: ink.line, showline: true, zeroline: false,
      exponentformat: "power", nticks: 7, ...own, title: { standoff: 12, ...own.title },
    });
    return {
      ...figure.layout,
      xaxis: axis(figure.layout.xaxis),
      yaxis: axis(figure.layout.yaxis),
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink.text },
      hoverlabel: { bgcolor: ink.card, bordercolor: ink.line, font: { color: ink.ink }, namelength: -1 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 12, t: 12, b: 8 },
      showlegend: false,
      hovermode: "closest",
      dragmode: coarse ? false : "zoom", // a finger that scrolls must not zoom
      uirevision: "kept",
    };
  }

  function draw(figure) {
    const name = theme();
    const config = { responsive: true, displayModeBar: false };
    return Plotly.react(figure.id, traces(figure, name), layout(figure, name), config);
  }

  async function drawAll() {
    for (const figure of figures) {
      await new Promise((go) => setTimeout(go)); // the page stays alive between plots
      await draw(figure);
    }
    root.dataset.drawn = theme();
  }

  const button = document.getElementById("theme");
  function repaint() {
    button.textContent = theme() === "dark" ? "Light theme" : "Dark theme";
    return drawAll();
  }
  button.addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("gradsieve-theme", root.dataset.theme);
    } catch { /* some browsers keep nothing for local files */ }
    repaint();
  });
  system.addEventListener("change", repaint);

  for (const key of document.querySelectorAll(".key[data-run]")) {
    key.addEventListener("click", () => {
      const run = key.dataset.run;
      if (!hidden.delete(run)) hidden.add(run);
      for (const twin of document.querySelectorAll(".key[data-run]")) {
        twin.setAttribute("aria-pressed", String(!hidden.has(twin.dataset.run)));
      }
      figures.filter((figure) => String(figure.section) === run.split("/")[0]).forEach(draw);
    });
  }
  repaint();
})();
