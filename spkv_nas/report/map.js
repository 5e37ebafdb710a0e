/* Redraw the map as the explorer changes: a path per shade, the numbers, and outlines of the chosen heads. */
function minus(text) { return text.replace("-", "\u2212"); }
function cellText(scale, value) { /* format a value as on the static map */
  const number = scale.factor * value;
  if (Number(number.toFixed(1)) === 0) return "0";
  return minus(number.toFixed(scale.even && Math.abs(number) < 9.95 ? 1 : 0));
}
function shade(scale, value, last) {
  const stretch = number => scale.even ? Math.asinh(number / scale.even) : number;
  const share = (stretch(value) - stretch(scale.low)) / (stretch(scale.high) - stretch(scale.low));
  return Math.round(Math.min(1, Math.max(0, share)) * last);
}
function live(map, explorer, rows) {
  const [columns, step, left, top] = map.dataset.map.split(" ").map(Number), total = rows * columns;
  const staticCells = map.querySelector(".cells"), transform = staticCells.getAttribute("transform");
  staticCells.setAttribute("display", "none"); /* hidden, not removed: small maps reuse its cells */
  map.querySelector(".values").remove();
  const group = make(map, "g", { transform }), values = make(map, "g", { class: "values" });
  const fills = make(group, "g", { transform: "translate(0 " + FILLED / 2 + ")", "stroke-width": FILLED });
  const paths = explorer.shades.map(stroke => make(fills, "path", { stroke, d: "" })), currentPaths = paths.map(() => "");
  const other = make(group, "path", { class: "other", d: "" }), global = make(group, "path", { class: "global", d: "" });
  const texts = Array.from({ length: total }, (_, cell) => make(values, "text", {
    x: left + (cell % columns + FILLED / 2) * step, y: top + (Math.floor(cell / columns) + FILLED / 2) * step + 4,
  }));
  const currentTexts = texts.map(() => ""), currentInks = texts.map(() => "");
  const perFrame = 64; /* numbers written per frame, because text layout is slow */
  let cellTexts = [], next = 0, timer = 0;
  function paint(scale, numbers) {
    const newPaths = paths.map(() => ""), isDelayed = cellTexts.length && total > perFrame;
    cellTexts = numbers.map((value, cell) => {
      if (Number.isNaN(value)) return ["", "on-light"];
      const shadeIndex = shade(scale, value, paths.length - 1);
      newPaths[shadeIndex] += "M" + cell % columns + " " + Math.floor(cell / columns) + "h" + FILLED;
      return [cellText(scale, value), shadeIndex >= explorer.dark ? "on-light" : "on-dark"];
    });
    paths.forEach((path, shadeIndex) => { if (newPaths[shadeIndex] !== currentPaths[shadeIndex]) path.setAttribute("d", newPaths[shadeIndex]); });
    currentPaths.splice(0, currentPaths.length, ...newPaths);
    next = 0;
    clearTimeout(timer);
    if (isDelayed) { /* hide numbers until their colours match the cells */
      values.setAttribute("opacity", "0");
      timer = setTimeout(write, 150, perFrame);
    } else write(total);
  }
  function write(limit) {
    for (let remaining = limit; next < total && remaining; next++) {
      const [text, ink] = cellTexts[next];
      if (currentTexts[next] === text && currentInks[next] === ink) continue;
      if (currentTexts[next] !== text) texts[next].textContent = currentTexts[next] = text;
      if (currentInks[next] !== ink) texts[next].setAttribute("class", currentInks[next] = ink);
      remaining--;
    }
    if (next < total) timer = setTimeout(write, 0, perFrame); else values.removeAttribute("opacity");
  }
  function squares(mask) {
    return mask.map((isGlobal, cell) => isGlobal ? "M" + cell % columns + " " + Math.floor(cell / columns) + "h" + FILLED + "v" + FILLED + "h-" + FILLED + "z" : "").join("");
  }
  function outline(mask, otherMask) {
    global.setAttribute("d", squares(mask));
    other.setAttribute("d", squares(otherMask));
  }
  return { paint, outline };
}
