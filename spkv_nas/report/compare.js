/* Compare two layouts side by side, list all measured layouts, and link points of charts to the map. */
function smallMap(figure, layers, heads) { /* draw a layout's global heads: grey if global in both layouts, coloured if only in this one */
  const svg = figure.querySelector("svg"), parts = ["pair-none", "pair-both", "pair-own"].map(name => make(svg, "path", { class: name, d: "" }));
  svg.setAttribute("viewBox", "-0.6 -0.6 " + (layers + 0.2) + " " + (heads + 0.2));
  svg.setAttribute("width", 20 * layers);
  return (name, mask, other) => {
    const paths = ["", "", ""];
    mask.forEach((one, head) => {
      paths[one ? 2 - other[head] : 0] += "M" + (Math.floor(head / heads) - FILLED / 2) + " " + head % heads + "h" + FILLED;
    });
    parts.forEach((part, number) => part.setAttribute("d", paths[number]));
    figure.querySelector("h3").textContent = name;
  };
}
const REACH = 8; /* greatest distance of the pointer from a dot */
function delta(change, error) {
  return (change < 0 ? "\u2212" : "+") + Math.abs(change).toFixed(3) + " \u00b1 " + (error === null ? "\u2014" : error.toFixed(3));
}
/* Select a layout among the dots of one element: the nearest to the pointer, or by arrow keys; open it by click or Enter. */
function linkClouds(given, layouts, goTo) {
  const said = at => [layouts[at].name, count(layouts[at].mask) + " global heads", ...given.measured.flatMap(([how, , results]) =>
    results.filter(([one]) => one === at).map(([, change, error]) => delta(change, error) + " %, " + how)),
    ...at < given.known ? [] : ["stopped before all text was read"]].join("\n");
  for (const chart of document.querySelectorAll("svg.chart:has([data-cloud])")) {
    const dots = [...chart.querySelectorAll("[data-cloud]")].flatMap(path => {
      let x = 0, y = 0;
      const { layouts: places } = data.charts[chart.dataset.chart].marks[path.dataset.cloud];
      return [...path.getAttribute("d").matchAll(/m(-?\d+) ?(-?\d+)z/g)].map(([, right, down], dot) => [x += Number(right), y += Number(down), places[dot]]);
    }).filter(([, , at]) => at >= 0).sort((one, other) => one[0] - other[0] || other[1] - one[1]);
    if (!dots.length) continue;
    chart.setAttribute("role", "group");
    const cursor = make(chart, "circle", { class: "cursor", r: REACH, role: "button", tabindex: "0", "data-at": "" });
    let current;
    const move = dot => {
      const [cx, cy, at] = dots[current = dot];
      for (const [name, value] of Object.entries({ cx, cy, "aria-label": said(at) })) cursor.setAttribute(name, value);
    };
    const near = event => {
      const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
      const away = dots.map(dot => Math.hypot(dot[0] - x, dot[1] - y)), least = Math.min(...away), over = event.target.closest("[role=button]");
      return least < REACH && (!over || over === cursor) ? away.indexOf(least) : -1;
    };
    chart.addEventListener("pointermove", event => {
      const dot = near(event);
      if (dot < 0 || dot === current && !tip.hidden) return;
      move(dot);
      show(cursor);
    });
    chart.addEventListener("click", event => {
      const dot = near(event);
      if (dot >= 0) goTo(dots[dot][2]);
    });
    cursor.addEventListener("keydown", event => {
      const next = current + (steps[event.key] || [0, 0]).reduce((sum, step) => sum + step);
      if (event.key === "Enter" || event.key === " ") goTo(dots[current][2]);
      else if (!steps[event.key]) return;
      else if (dots[next]) {
        move(next);
        show(cursor);
      }
      event.preventDefault();
    });
    move(0);
  }
}
/* Fill the table of all measured layouts, which can be filtered and sorted. */
function measuredTable(given, layouts, coverage, goTo) {
  const element = name => document.getElementById("measured-" + name);
  if (!element("all")) return;
  const ways = 4, every = layouts.slice(0, given.known).map(({ name, mask }, at) => ({ at, errors: [], cells:
    [name, null, null, null, count(mask), coverage(mask), ...given.costs ? [Number(given.costs[at])] : []] }));
  for (const [, column, results] of given.measured) for (const [at, change, error] of results) if (column > 0) {
    every[at].cells[column] = change;
    every[at].errors[column] = error;
  }
  const rows = every.filter(({ cells }) => cells.slice(1, ways).some(cell => cell !== null));
  const heads = element("all").tHead.rows[0].cells, body = element("all").tBodies[0], most = 20;
  const tags = new Map([...body.rows].map(row => [row.cells[0].firstChild.textContent, row.querySelector(".tag")]).filter(([, tag]) => tag));
  const sizes = [...new Set(rows.map(row => row.cells[ways]))].sort((one, other) => one - other);
  element("heads").replaceChildren(new Option("any number", ""), ...sizes.map(number => new Option(number, number)));
  let column = [1, 2, 3].find(at => rows.some(({ cells }) => cells[at] !== null)), up = true, whole = false;
  function draw() {
    const words = element("filter").value.toLowerCase().split(/\s+/), number = element("heads").value;
    const found = rows.filter(({ cells }) => words.every(word => cells[0].toLowerCase().includes(word)) && (!number || cells[ways] === Number(number)));
    const value = row => row.cells[column];
    found.sort((one, other) => {
      if (value(one) === null || value(other) === null) return (value(one) === null) - (value(other) === null) || one.at - other.at;
      const order = column ? value(one) - value(other) : value(one).localeCompare(value(other), "en", { numeric: true });
      return (up ? order : -order) || one.at - other.at;
    });
    [...heads].forEach((head, at) => { at === column ? head.setAttribute("aria-sort", up ? "ascending" : "descending") : head.removeAttribute("aria-sort"); });
    body.replaceChildren(...found.slice(0, whole ? found.length : most).map(row => {
      const line = document.createElement("tr"), head = document.createElement("th"), button = document.createElement("button");
      head.scope = "row";
      button.type = "button";
      button.className = "plain";
      button.textContent = row.cells[0];
      button.addEventListener("click", () => goTo(row.at));
      head.append(button);
      if (tags.has(row.cells[0])) head.append(tags.get(row.cells[0]).cloneNode(true));
      line.append(head, ...row.cells.slice(1).map((cell, at) => {
        const made = document.createElement("td"), place = at + 1;
        made.textContent = place < ways ? cell === null ? "\u2014" : delta(cell, row.errors[place]) :
          place === ways + 1 ? (100 * cell).toFixed(1) : place === ways + 2 ? given.costs[row.at] : cell;
        return made;
      }));
      return line;
    }));
    element("count").textContent = found.length + " of " + rows.length + " layouts" + (body.rows.length < found.length ? ", the first " + most + " shown" : "");
    element("more").hidden = body.rows.length === found.length;
  }
  [...heads].forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "plain";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      up = at === column ? !up : true;
      column = at;
      draw();
    });
  });
  element("filter").addEventListener("input", draw);
  element("heads").addEventListener("input", draw);
  element("more").addEventListener("click", () => { whole = true; draw(); });
  draw();
}
/* Link points whose tooltip starts with the name of a layout: open it by click or Enter; arrow keys move between points. */
function linkPoints(given, goTo) {
  const places = new Map();
  for (const [name, at] of [...given.layouts.map(([name], at) => [name, at]), ...given.aliases])
    places.set(name, places.has(name) && places.get(name) !== at ? -1 : at);
  for (const chart of document.querySelectorAll("svg.chart")) {
    const found = [...chart.querySelectorAll("[data-at]")].map(point => [point, places.get(tipOf(point).split("\n")[0])]).filter(([, at]) => at >= 0);
    if (!found.length) continue;
    const centre = point => point.getBBox().x + point.getBBox().width / 2;
    const points = found.map(([point]) => point).sort((one, other) => centre(one) - centre(other));
    chart.setAttribute("role", "group");
    found.forEach(([point, at]) => {
      point.setAttribute("aria-label", tipOf(point));
      point.setAttribute("role", "button");
      point.setAttribute("tabindex", point === points[0] ? "0" : "-1");
      point.addEventListener("click", () => goTo(at));
      point.addEventListener("keydown", event => {
        const next = points[points.indexOf(point) + (steps[event.key] || [0, 0]).reduce((sum, step) => sum + step)];
        if (event.key === "Enter" || event.key === " ") goTo(at);
        else if (!steps[event.key] || !next) return;
        else {
          point.setAttribute("tabindex", "-1");
          next.setAttribute("tabindex", "0");
          next.focus();
        }
        event.preventDefault();
      });
    });
  }
}
