/* Compare two layouts side by side, list all measured layouts, and link points of charts to the map. */
function smallMap(figure, layers, heads, absent) { /* draw a layout's global heads: grey if global in both layouts, coloured if only in this one */
  const svg = figure.querySelector("svg"), parts = ["pair-none", "pair-both", "pair-only"].map(name => make(svg, "path", { class: name, d: "" }));
  svg.setAttribute("viewBox", "-0.6 -0.6 " + (layers + 0.2) + " " + (heads + 0.2));
  svg.setAttribute("width", 20 * layers);
  return (name, mask, other) => {
    const paths = ["", "", ""];
    mask.forEach((isGlobal, head) => {
      if (!absent.has(head)) paths[isGlobal ? 2 - other[head] : 0] += "M" + (Math.floor(head / heads) - FILLED / 2) + " " + head % heads + "h" + FILLED;
    });
    parts.forEach((part, number) => part.setAttribute("d", paths[number]));
    figure.querySelector("h3").textContent = name;
  };
}
const REACH = 8; /* greatest distance of the pointer from a dot */
function delta(change, error) {
  return (change < 0 ? "\u2212" : "+") + Math.abs(change).toFixed(3) + " \u00b1 " + (error === null ? "\u2014" : error.toFixed(3));
}
/* Move between neighbours by arrow keys, open by Enter or space. */
function walk(event, at, length, move, open) {
  if (event.key === "Enter" || event.key === " ") open();
  else if (!steps[event.key]) return;
  const next = at + (steps[event.key] || [0, 0]).reduce((sum, step) => sum + step);
  if (next !== at && next >= 0 && next < length) move(next);
  event.preventDefault();
}
/* Select a layout among the dots of one element: the nearest to the pointer, or by arrow keys; open it by click or Enter. */
function linkClouds(explorer, layouts, goTo) {
  const describe = index => [layouts[index].name, count(layouts[index].mask) + " global heads", ...explorer.measured.flatMap(([mode, , results]) =>
    results.filter(([layout]) => layout === index).map(([, change, error]) => delta(change, error) + " %, " + mode))].join("\n");
  for (const chart of document.querySelectorAll("svg.chart:has([data-cloud])")) {
    const dots = [...chart.querySelectorAll("[data-cloud]")].flatMap(path => {
      let x = 0, y = 0;
      const { layouts: indices } = data.charts[chart.dataset.chart][path.dataset.cloud];
      return [...path.getAttribute("d").matchAll(/m(-?\d+) ?(-?\d+)z/g)].map(([, right, down], dot) => [x += Number(right), y += Number(down), indices[dot]]);
    }).filter(([, , index]) => index >= 0).sort((first, second) => first[0] - second[0] || second[1] - first[1]);
    if (!dots.length) continue;
    chart.setAttribute("role", "group");
    const cursor = make(chart, "circle", { class: "cursor", r: REACH, role: "button", tabindex: "0", "data-mark": "" });
    let current;
    const move = dot => {
      const [cx, cy, index] = dots[current = dot];
      for (const [name, value] of Object.entries({ cx, cy, "aria-label": describe(index) })) cursor.setAttribute(name, value);
    };
    const dotUnder = event => {
      const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
      const distances = dots.map(dot => Math.hypot(dot[0] - x, dot[1] - y)), nearest = Math.min(...distances), button = event.target.closest("[role=button]");
      return nearest < REACH && (!button || button === cursor) ? distances.indexOf(nearest) : -1;
    };
    chart.addEventListener("pointermove", event => {
      const dot = dotUnder(event);
      if (dot < 0 || dot === current && !tip.hidden) return;
      move(dot);
      show(cursor);
    });
    chart.addEventListener("click", event => {
      const dot = dotUnder(event);
      if (dot >= 0) goTo(dots[dot][2]);
    });
    cursor.addEventListener("keydown", event => walk(event, current, dots.length, next => { move(next); show(cursor); }, () => goTo(dots[current][2])));
    move(0);
  }
}
function tag(name, properties, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}
function plainButton(text, open) {
  return tag("button", { type: "button", className: "plain", onclick: open }, text);
}
/* Fill the table of all measured layouts, which can be filtered and sorted. */
function measuredTable(explorer, layouts, coverage, goTo) {
  const element = name => document.getElementById("measured-" + name);
  if (!element("all")) return;
  const headsColumn = 4, entries = layouts.map(({ name, mask }, index) => ({ index, errors: [], cells:
    [name, null, null, null, count(mask), coverage(mask), ...explorer.costs ? [Number(explorer.costs[index])] : []] }));
  for (const [, column, results] of explorer.measured) for (const [index, change, error] of results) if (column > 0) {
    entries[index].cells[column] = change;
    entries[index].errors[column] = error;
  }
  const rows = entries.filter(({ cells }) => cells.slice(1, headsColumn).some(cell => cell !== null));
  const heads = element("all").tHead.rows[0].cells, body = element("all").tBodies[0], maxRows = 20;
  const tags = new Map([...body.rows].map(row => [row.cells[0].firstChild.textContent, row.querySelector(".tag")]).filter(([, tag]) => tag));
  const sizes = [...new Set(rows.map(row => row.cells[headsColumn]))].sort((first, second) => first - second);
  element("heads").replaceChildren(new Option("any number", ""), ...sizes.map(number => new Option(number, number)));
  let column = [1, 2, 3].find(position => rows.some(({ cells }) => cells[position] !== null)), isAscending = true, showAll = false;
  function draw() {
    const words = element("filter").value.toLowerCase().split(/\s+/), number = element("heads").value;
    const matches = rows.filter(({ cells }) => words.every(word => cells[0].toLowerCase().includes(word)) && (!number || cells[headsColumn] === Number(number)));
    const value = row => row.cells[column];
    matches.sort((first, second) => {
      if (value(first) === null || value(second) === null) return (value(first) === null) - (value(second) === null) || first.index - second.index;
      const order = column ? value(first) - value(second) : value(first).localeCompare(value(second), "en", { numeric: true });
      return (isAscending ? order : -order) || first.index - second.index;
    });
    [...heads].forEach((head, position) => { position === column ? head.setAttribute("aria-sort", isAscending ? "ascending" : "descending") : head.removeAttribute("aria-sort"); });
    body.replaceChildren(...matches.slice(0, showAll ? matches.length : maxRows).map(row => {
      const head = tag("th", { scope: "row" }, plainButton(row.cells[0], () => goTo(row.index)));
      if (tags.has(row.cells[0])) head.append(tags.get(row.cells[0]).cloneNode(true));
      return tag("tr", {}, head, ...row.cells.slice(1).map((cell, previous) => {
        const position = previous + 1;
        return tag("td", {}, position < headsColumn ? cell === null ? "\u2014" : delta(cell, row.errors[position]) :
          position === headsColumn + 1 ? (100 * cell).toFixed(1) : position === headsColumn + 2 ? explorer.costs[row.index] : cell);
      }));
    }));
    element("count").textContent = matches.length + " of " + rows.length + " layouts" + (body.rows.length < matches.length ? ", the first " + maxRows + " shown" : "");
    element("more").hidden = body.rows.length === matches.length;
  }
  [...heads].forEach((head, position) => head.replaceChildren(plainButton(head.textContent, () => {
    isAscending = position === column ? !isAscending : true;
    column = position;
    draw();
  })));
  element("filter").addEventListener("input", draw);
  element("heads").addEventListener("input", draw);
  element("more").addEventListener("click", () => { showAll = true; draw(); });
  draw();
}
/* Link points whose tooltip starts with the name of a layout: open it by click or Enter; arrow keys move between points. */
function linkPoints(explorer, goTo) {
  const indexByName = new Map();
  for (const [name, index] of [...explorer.layouts.map(([name], index) => [name, index]), ...explorer.aliases])
    indexByName.set(name, indexByName.has(name) && indexByName.get(name) !== index ? -1 : index);
  for (const chart of document.querySelectorAll("svg.chart")) {
    const linked = [...chart.querySelectorAll("[data-mark]")].map(point => [point, indexByName.get(tipOf(point).split("\n")[0])]).filter(([, index]) => index >= 0);
    if (!linked.length) continue;
    const centre = point => point.getBBox().x + point.getBBox().width / 2;
    const points = linked.map(([point]) => point).sort((first, second) => centre(first) - centre(second));
    chart.setAttribute("role", "group");
    linked.forEach(([point, index]) => {
      point.setAttribute("aria-label", tipOf(point));
      point.setAttribute("role", "button");
      point.setAttribute("tabindex", point === points[0] ? "0" : "-1");
      point.addEventListener("click", () => goTo(index));
      point.addEventListener("keydown", event => walk(event, points.indexOf(point), points.length, next => {
        point.setAttribute("tabindex", "-1");
        points[next].setAttribute("tabindex", "0");
        points[next].focus();
      }, () => goTo(index)));
    });
  }
}
