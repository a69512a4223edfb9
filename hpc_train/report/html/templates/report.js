"use strict";
// Adds to a page that is complete without it: theme, sorting, filter, and values below the pointer or the arrow keys.
// Text from runs is only ever set as text, never as markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const data = JSON.parse($("data").textContent);
  const tip = $("tip");

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function showTip(x, y, children) {
    tip.replaceChildren(...children);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.min(Math.max(4, y - height - 10), innerHeight - height - 4)}px`;
  }

  // What shows the tip again at its new place once the page was scrolled; the pointer's is hidden instead.
  let again = null;

  function hideTip() {
    tip.hidden = true;
    again = null;
  }

  // A page that scrolls below a resting pointer causes the pointer's events too: what the keyboard shows stays.
  const rests = (event) => again !== null && event.movementX === 0 && event.movementY === 0;

  // Theme: the system's, then light, then dark.
  const themes = ["system", "light", "dark"];
  const theme = $("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(document.documentElement.dataset.theme || "system") + 1) % themes.length];
    document.documentElement.dataset.theme = next;
    theme.textContent = `Theme: ${next}`;
  });

  // Tables of runs: sorted by a column, filtered by words, columns chosen in a menu.
  const tables = all("table.runs");
  const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);

  function keyOf(row, column) {
    const cell = row.cells[column];
    const key = cell.dataset.key ?? cell.textContent;
    const number = Number(key);
    return key !== "" && Number.isFinite(number) ? number : key;
  }

  function compare(a, b) {
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a === typeof b) return a < b ? -1 : Number(a > b);
    return typeof a === "number" ? -1 : 1;
  }

  function sortable(table, head, column) {
    const button = element("button", head.textContent);
    button.type = "button";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const isRising = head.getAttribute("aria-sort") !== "ascending";
      all("[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", isRising ? "ascending" : "descending");
      const keyed = [...table.tBodies[0].rows].map((row) => [keyOf(row, column), row]);
      keyed.sort(([a], [b]) => (a === "" || b === "" || isRising ? compare(a, b) : compare(b, a)));
      table.tBodies[0].append(...keyed.map(([, row]) => row));
    });
  }

  // The first columns are shown, as many as the screen has room for; the menu shows and hides the others.
  function columnMenu(table) {
    const heads = [...table.tHead.rows[0].cells];
    const menu = element("details", undefined, "menu");
    const summary = element("summary");
    const choices = element("div");
    const most = matchMedia("(max-width: 600px)").matches ? data.columns.narrow : data.columns.wide;
    const count = () => { summary.textContent = `Columns: ${heads.filter((head) => !head.hidden).length} of ${heads.length}`; };
    heads.forEach((head, column) => {
      const label = element("label");
      const box = element("input");
      const toggle = () => {
        for (const row of table.rows) row.cells[column].hidden = !box.checked;
        count();
      };
      box.type = "checkbox";
      box.checked = column < most;
      box.addEventListener("change", toggle);
      if (!box.checked) toggle();
      label.append(box, head.textContent);
      if (column > 0) choices.append(label);
    });
    count();
    menu.append(summary, choices);
    menu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") menu.open = false;
    });
    document.addEventListener("pointerdown", (event) => {
      if (!menu.contains(event.target)) menu.open = false;
    });
    table.closest(".ranking").querySelector(".head").append(menu);
  }

  for (const table of tables) {
    columnMenu(table);
    [...table.tHead.rows[0].cells].forEach((head, column) => sortable(table, head, column));
  }

  if (rows.length > 8) {
    $("filter").hidden = false;
    $("find").addEventListener("input", (event) => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        count += !row.hidden;
      }
      $("found").textContent = words.length ? `${count} of ${rows.length} runs` : "";
    });
  }

  // Sheets of predictions: the samples of a class.
  for (const choice of all(".sheet select")) {
    choice.parentElement.hidden = false;
    choice.addEventListener("change", () => {
      for (const sample of all("figure", choice.closest(".sheet"))) {
        sample.hidden = choice.value !== "" && !sample.dataset.classes.split(" ").includes(choice.value);
      }
    });
  }

  // On a narrow screen, the cells of these tables are below each other, each after the title of its column.
  for (const table of all("table.stacked")) {
    const titles = [...table.tHead.rows[0].cells].map((head) => head.textContent);
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, column) => { cell.dataset.title = titles[column]; });
    }
  }

  // Legend: shows or hides a run in all charts.
  const hiddenRuns = new Set();
  all("#legend button").forEach((button) => button.addEventListener("click", () => {
    const run = Number(button.dataset.run);
    const isShown = !hiddenRuns.delete(run);
    if (isShown) hiddenRuns.add(run);
    button.setAttribute("aria-pressed", String(!isShown));
    all(`.charts [data-run="${run}"]`).forEach((part) => part.classList.toggle("off", isShown));
  }));

  // Charts: a cursor over the steps.
  const format = (value) => (Number.isInteger(value) && Math.abs(value) < 1e6 ? value.toLocaleString("en")
    : Number(value.toPrecision(6)).toString());

  function nearest(steps, step) {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
  }

  function share(value, [low, high, isLog]) {
    return isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  }

  function follow(frame) {
    const chart = data.charts[Number(frame.dataset.chart)];
    const area = frame.querySelector(".area");
    const curves = new Map(all(".curve", area).map((curve) => [Number(curve.dataset.run), curve]));
    const lines = chart.lines.slice().sort((a, b) => a[0] - b[0]);
    const named = lines.filter(([run]) => run < data.highlighted);
    const steps = [...new Set(named.flatMap((line) => line[1]))].sort((a, b) => a - b);
    const label = frame.getAttribute("aria-label");
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    let place = steps.length - 1, picked = null;

    all(".spike title", area).forEach((title) => title.remove());  // the tip has the same words
    cursor.setAttribute("class", "cursor off");
    cursor.setAttribute("y2", "100%");
    area.append(cursor);
    frame.tabIndex = 0;
    frame.setAttribute("role", "slider");
    frame.setAttribute("aria-label", `${label}. Cursor over the steps`);
    frame.setAttribute("aria-valuemin", steps[0] ?? 0);
    frame.setAttribute("aria-valuemax", steps.at(-1) ?? 0);
    setValue([]);

    // The spikes next to the cursor, the newest ones.
    function spikes() {
      const near = ([run, step]) => !hiddenRuns.has(run) && nearest(steps, step) === place;
      return chart.spikes.filter(near).slice(-4);
    }

    function setValue(found) {
      const values = found.map(([run, value]) => `${data.runs[run]} ${format(value)}`);
      const words = [...values, ...spikes().map(([, , text]) => text)].join(", ");
      frame.setAttribute("aria-valuenow", steps[place] ?? 0);
      frame.setAttribute("aria-valuetext", `step ${steps[place] ?? 0}${words ? `: ${words}` : ""}`);
    }

    function pick(run) {
      if (picked !== null) curves.get(picked)?.classList.remove("picked");
      picked = run;
      if (picked !== null) curves.get(picked)?.classList.add("picked");
    }

    function values(step) {
      // A run that has ended has no value later.
      return named.filter(([run, at]) => !hiddenRuns.has(run) && at[0] <= step && step <= at.at(-1))
        .map(([run, at, found]) => [run, found[nearest(at, step)]]);
    }

    function show(step, x, y, other) {
      const found = values(step);
      const across = `${100 * share(step, [...chart.x, 0])}%`;
      cursor.setAttribute("class", "cursor");
      cursor.setAttribute("x1", across);
      cursor.setAttribute("x2", across);
      const children = [element("b", `step ${format(step)}`)];
      for (const [run, value] of other === null ? found : [...found, other]) {
        const line = element("div");
        const isNamed = run < data.highlighted;
        line.append(element("i", "", isNamed ? `c${run}` : "muted"), element("span", data.runs[run]), element("b", format(value)));
        children.push(line);
      }
      for (const [run, , text] of spikes()) {
        const line = element("div");
        line.append(element("i", "", `c${run}`), element("span", text));
        children.push(line);
      }
      showTip(x, y, children);
      setValue(found);
    }

    function unmark() {
      cursor.setAttribute("class", "cursor off");
      pick(null);
    }

    function leave() {
      unmark();
      hideTip();
    }

    function under(step, down) {
      let best = null, least = 0.06;
      for (const [run, at, found] of lines) {
        if (run < data.highlighted || step < at[0] || step > at.at(-1)) continue;
        const value = found[nearest(at, step)];
        const distance = Math.abs(1 - share(value, chart.y) - down);
        if (distance < least) [best, least] = [[run, value], distance];
      }
      return best;
    }

    area.addEventListener("pointermove", (event) => {
      if (!steps.length || rests(event)) return;
      const box = area.getBoundingClientRect();
      const [low, high] = chart.x;
      const step = low + ((event.clientX - box.left) / box.width) * (high - low);
      place = nearest(steps, step);
      const other = under(steps[place], (event.clientY - box.top) / box.height);
      pick(other && other[0]);
      again = null;
      show(steps[place], event.clientX, event.clientY, other);
    });
    frame.addEventListener("blur", leave);

    const atCursor = () => {
      if (!steps.length) return;
      again = atCursor;
      const box = area.getBoundingClientRect();
      show(steps[place], box.left + share(steps[place], [...chart.x, 0]) * box.width, box.top + 30, null);
    };
    area.addEventListener("pointerleave", () => {
      if (again === atCursor) return;
      unmark();
      if (again === null) hideTip();
    });
    frame.addEventListener("focus", () => { if (frame.matches(":focus-visible")) atCursor(); });
    frame.addEventListener("keydown", (event) => {
      const page = Math.max(1, Math.round(steps.length / 10));
      const moves = {
        ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -page, PageUp: page,
        Home: -steps.length, End: steps.length,
      };
      if (event.key === "Escape") leave();
      if (!(event.key in moves)) return;
      event.preventDefault();
      place = Math.min(Math.max(place + moves[event.key], 0), steps.length - 1);
      atCursor();
    });
  }

  all(".frame").forEach(follow);
  addEventListener("scroll", () => (again ? again() : hideTip()), { passive: true });
})();
