// A reader of checkpoint directories, written from docs/format.md alone.
//
//   NODE_PACKAGES=directory-with-node_modules node independent.mjs DIR [EPOCH]
//
// It checks all digests, and prints as JSON {epochs, pins, epoch, nodes: {node: {blob: value}}} of
// the given epoch, or of the newest. What JSON lacks is {"$": kind, "of": ...} in a value, as it is
// in the tree, with these changes:
//
// - an array is {"$": "array", "of": {dtype, shape, order, data}}: "order" has the axes as they lie
//   in memory, "data" is the flat list of the items, the last axis fastest: dates are integers,
//   complex numbers [real, imaginary], records lists of their fields, and bytes and what JavaScript
//   has no numbers for are the bytes of the item, in hexadecimal,
// - "dict" has a list of [key, value],
// - "same" has the path of keys and indices, in the blob, to the place where the object is printed,
// - "numbers" are printed as the list that they stand for.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";

const packages = createRequire(join(resolve(process.env.NODE_PACKAGES ?? "."), "/"));
const zstd = packages("fzstd");
const xxh3 = await packages("hash-wasm").createXXHash128();

class Refused extends Error {}

function need(condition, message) {
  if (!condition) throw new Refused(message);
}

// JSON: integers are numbers of JavaScript here, floats of this class, objects Maps.

class Float {
  constructor(value, bits) {
    const view = new DataView(new ArrayBuffer(8));
    if (bits === undefined) view.setFloat64(0, value);
    else view.setBigUint64(0, bits);
    this.value = view.getFloat64(0);
    this.bits = bits ?? view.getBigUint64(0); // those of a NaN say more than the number
  }
  static ofBits(bits) {
    return new Float(NaN, bits);
  }
}

const TOKEN = /[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*"|[-\d][-+.\deE]*|true|false|null|[[\]{},:])/y;
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

function parse(text) {
  let token;
  TOKEN.lastIndex = 0;
  const next = (...wanted) => {
    token = TOKEN.exec(text)?.[1];
    need(token && (!wanted.length || wanted.includes(token)), `not JSON: ${text.slice(0, 60)}`);
    return token;
  };
  const value = () => {
    if (token === "[") {
      const list = [];
      if (next() === "]") return list;
      for (;;) {
        list.push(value());
        if (next(",", "]") === "]") return list;
        next();
      }
    }
    if (token === "{") {
      const object = new Map();
      if (next() === "}") return object;
      for (;;) {
        need(token[0] === '"', "not JSON: a key is no text");
        const key = JSON.parse(token);
        need(!object.has(key), `an object has the key ${token} twice`);
        next(":");
        next();
        object.set(key, value());
        if (next(",", "}") === "}") return object;
        next();
      }
    }
    const scalar = JSON.parse(token);
    return typeof scalar === "number" && /[.eE]/.test(token) ? new Float(scalar) : scalar;
  };
  next();
  const result = value();
  need(!text.slice(TOKEN.lastIndex).trim(), "not JSON: more follows");
  return result;
}

const sha256 = (bytes) => createHash("sha256").update(bytes).digest("hex");

// The log.

function readLog(directory) {
  const files = readdirSync(join(directory, "_log")).filter((name) => /^\d{10,}\.json$/.test(name));
  files.sort((a, b) => parseInt(a) - parseInt(b));
  return files.map((file, number) => {
    const where = `_log/${file}`;
    const bytes = readFileSync(join(directory, where));
    need(file === `${String(number).padStart(10, "0")}.json`, `_log lacks the entry ${number}`);
    const head = /^\{"sha256":"([0-9a-f]{64})","entry":$/.exec(bytes.toString("latin1", 0, 85));
    need(head && bytes.toString("latin1", bytes.length - 2) === "}\n", `${where} is no entry`);
    const text = bytes.subarray(85, bytes.length - 2);
    need(sha256(text) === head[1], `${where} does not have its SHA-256`);
    const entry = parse(utf8.decode(text));
    need(entry.get("format") === 1, `${where} has format ${entry.get("format")}`);
    need(entry.get("number") === number, `${where} has number ${entry.get("number")}`);
    return entry;
  });
}

function position(epoch) {
  if (Number.isInteger(epoch) && epoch >= 0) return [epoch, 0];
  const parts = /^(\d+)\.s(\d+)$/.exec(epoch);
  need(parts, `${epoch} is no epoch`);
  return [Number(parts[1]), Number(parts[2])];
}

function compare(one, other) {
  const [a, b] = [position(one), position(other)];
  return a[0] - b[0] || a[1] - b[1];
}

const OTHER_ENTRIES = ["run", "claim", "done", "end", "lost"];

// Returns epoch -> {stores, pins}.
function replay(entries) {
  const recorded = new Map();
  const retire = (epochs) => {
    for (const epoch of epochs) if (!recorded.get(epoch)?.pins.size) recorded.delete(epoch);
  };
  let lost = false;
  let isRepair = false;
  for (const entry of entries) {
    const kind = entry.get("kind");
    if (kind === "commit") {
      for (const record of entry.get("records")) {
        const stores = record.get("stores");
        const at = record.get("at");
        if (stores !== null) recorded.set(at, { stores, pins: recorded.get(at)?.pins ?? new Set() });
      }
      retire(entry.get("retires") ?? []);
    } else if (kind === "retire") {
      retire(entry.get("epochs"));
    } else if (kind === "rewind") {
      if (entry.has("only")) recorded.delete(entry.get("only"));
      else {
        const after = entry.get("after") ?? null;
        for (const epoch of [...recorded.keys()]) {
          if (after === null || compare(epoch, after) > 0) recorded.delete(epoch);
        }
      }
    } else if (kind === "pin") {
      recorded.get(entry.get("epoch"))?.pins.add(entry.get("label"));
    } else if (kind === "unpin") {
      const pins = recorded.get(entry.get("epoch"))?.pins;
      if (entry.get("label") === null) pins?.clear();
      else pins?.delete(entry.get("label"));
    } else need(OTHER_ENTRIES.includes(kind), `entry ${entry.get("number")} is of kind ${kind}`);
    if (kind === "lost") lost = true;
    if (kind === "run") isRepair = entry.get("is_repair") === true;
    if (kind === "end" && isRepair) lost = false;
  }
  need(!lost, "entries of the log were lost, and no run has repaired it");
  return recorded;
}

// Arrays.

const product = (numbers) => numbers.reduce((a, b) => a * b, 1);

// All indices of an array of this shape, the last axis fastest.
function* indices(shape) {
  const index = shape.map(() => 0);
  for (let left = product(shape); left > 0; left--) {
    yield index;
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      if (++index[axis] < shape[axis]) break;
      index[axis] = 0;
    }
  }
}

// Returns the items of a chunk in the order of its file.
function decode(bytes, dtype, count, name) {
  const items = [];
  if (!isText(dtype)) {
    const size = bytes.length / count;
    need(size === sizeOf(dtype, size), `${name} holds ${bytes.length} bytes`);
    for (let at = 0; at < bytes.length; at += size) {
      items.push(view(dtype, bytes.subarray(at, at + size)));
    }
    return items;
  }
  let at = 4;
  for (let left = bytes.readUInt32LE(0); left > 0; left--) {
    const end = at + 4 + bytes.readUInt32LE(at);
    items.push(utf8.decode(bytes.subarray(at + 4, end)));
    at = end;
  }
  need(items.length === count && at === bytes.length, `${name} holds ${items.length} texts`);
  return items;
}

// Returns {dtype, shape, order, data} of an array at a path of a store.
function readArray(store, documents, path, files) {
  const document = documents.get(path);
  need(document?.get("node_type") === "array", `the store has no array ${path}`);
  const about = document.get("attributes").get("/jobrunner");
  const dtype = about.get("dtype");
  const itemAxis = about.get("item_axis") === true;
  const own = (axes) => (itemAxis ? axes.slice(0, -1) : axes);
  const shape = own(document.get("shape"));
  const chunk = own(document.get("chunk_grid").get("configuration").get("chunk_shape"));
  let order = shape.map((_, axis) => axis);
  let isPressed = false;
  for (const codec of document.get("codecs")) {
    const name = codec.get("name");
    if (name === "transpose") order = own(codec.get("configuration").get("order"));
    else if (name === "zstd") isPressed = true;
    else need(["bytes", "vlen-utf8"].includes(name), `${path} has the codec ${name}`);
  }
  const inMemory = (axes) => order.map((axis) => axes[axis]);
  const grid = shape.map((length, axis) => Math.ceil(length / chunk[axis]));
  need(files.length === product(grid), `${path} has ${files.length} files`);

  const data = new Array(product(shape));
  let file = 0;
  for (const corner of indices(inMemory(grid))) {
    const place = [];
    order.forEach((axis, i) => (place[axis] = corner[i]));
    const name = `${path}/${["c", ...place, ...(itemAxis ? [0] : [])].join(".")}`;
    const bytes = readFileSync(join(store, name));
    const [size, digest] = files[file++];
    need(bytes.length === size, `${name} has ${bytes.length} bytes instead of ${size}`);
    need(xxh3.init().update(bytes).digest() === digest, `${name} does not have its XXH3`);
    const raw = isPressed ? Buffer.from(zstd.decompress(bytes)) : bytes;
    const items = decode(raw, dtype, product(chunk), name);
    let item = 0;
    for (const within of indices(inMemory(chunk))) {
      const here = [];
      order.forEach((axis, i) => (here[axis] = place[axis] * chunk[axis] + within[i]));
      if (here.every((index, axis) => index < shape[axis])) {
        data[here.reduce((at, index, axis) => at * shape[axis] + index, 0)] = items[item];
      }
      item++;
    }
  }
  return { dtype, shape, order, data };
}

const isText = (dtype) => dtype === "string" || dtype === "strict string";

// The bytes of an item as the value of a dtype.
function view(dtype, item) {
  if (Array.isArray(dtype)) return viewRecord(dtype, item);
  const size = item.length;
  const little = dtype[0] !== ">";
  const at = new DataView(item.buffer, item.byteOffset, size);
  const float = (bytes, from) =>
    bytes === 8
      ? Float.ofBits(at.getBigUint64(from, little))
      : new Float(at.getFloat32(from, little));
  if (dtype === "bfloat16") return view("<f4", Buffer.from([0, 0, ...item]));
  const kind = /^[<>|]/.test(dtype) ? dtype[1] : "";
  if (kind === "b") return item[0] !== 0;
  if (kind && "iumM".includes(kind)) {
    const digits = Buffer.from(item);
    const whole = BigInt(`0x${(little ? digits.reverse() : digits).toString("hex")}`);
    return kind === "u" ? whole : BigInt.asIntN(8 * size, whole);
  }
  if (kind === "f" && size === 2) return new Float(half(at.getUint16(0, little)));
  if (kind === "f" && size <= 8) return float(size, 0);
  if (kind === "c" && size <= 16) return [float(size / 2, 0), float(size / 2, size / 2)];
  if (kind === "U") {
    const points = [];
    for (let i = 0; i < size; i += 4) points.push(at.getUint32(i, little));
    while (points.at(-1) === 0) points.pop();
    return String.fromCodePoint(...points);
  }
  return item.toString("hex");
}

function half(bits) {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}

// The size of an item, or `unknown` for those that are named otherwise.
function sizeOf(dtype, unknown) {
  if (Array.isArray(dtype)) {
    return dtype.reduce((sum, [, type, shape]) => sum + sizeOf(type) * product(shape ?? []), 0);
  }
  const [, kind, size] = /^[<>|]([a-zA-Z])(\d+)/.exec(dtype) ?? [];
  return kind ? (kind === "U" ? 4 * size : Number(size)) : unknown;
}

function viewRecord(fields, record) {
  const values = [];
  let at = 0;
  for (const [name, type, shape] of fields) {
    const size = sizeOf(type);
    const items = Array.from({ length: product(shape ?? []) }, () => {
      at += size;
      return view(type, record.subarray(at - size, at));
    });
    if (name !== "") values.push(shape ? items : items[0]);
  }
  return values;
}

// Row number `row` of a stack.
function rowOf({ dtype, shape, order, data }, row) {
  const size = product(shape.slice(1));
  return {
    dtype,
    shape: shape.slice(1),
    order: order.filter((axis) => axis !== 0).map((axis) => axis - 1),
    data: data.slice(row * size, (row + 1) * size),
  };
}

// Trees.

class Value {
  constructor(kind, of) {
    this.kind = kind;
    this.of = of;
  }
}

const CODECS = new Set([
  ...["set", "frozenset", "deque", "defaultdict", "OrderedDict", "Counter", "bytearray"],
  ...["complex", "range", "date", "time", "datetime", "timedelta", "timezone", "zone", "decimal"],
  ...["uuid", "PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath", "random"],
  ...["scalar", "objects", "np.str_", "np.bytes_", "np.Generator", "np.BitGenerator"],
  ...["np.SeedSequence", "np.RandomState"],
]);
const LIBRARY = /^(torch|scipy|pandas|xarray|jax)\./;

// Returns the value of a tree; `array` gives an array by its index.
function grow(whole, array) {
  if (whole instanceof Map && whole.get("$") === "json") {
    whole = parse(utf8.decode(Buffer.from(array(whole.get("of")).data.map(Number))));
  }
  const containers = []; // in the order in which they begin
  const collect = (tree) => {
    if (tree === null || typeof tree !== "object" || tree instanceof Float) return;
    containers.push(tree);
    tree.forEach(collect);
  };
  collect(whole);
  const values = new Map();

  function value(tree) {
    const result = special(tree);
    values.set(tree, result);
    return result;
  }

  function special(tree) {
    if (Array.isArray(tree)) return tree.map(value);
    if (!(tree instanceof Map)) return tree;
    if (!tree.has("$")) return new Map([...tree].map(([key, item]) => [key, value(item)]));
    need(tree.size === 2 && tree.has("of"), "a tree has other fields beside `$` and `of`");
    const [kind, of] = [tree.get("$"), tree.get("of")];
    if (kind === "array") return new Value(kind, array(of));
    if (kind === "same") {
      need(values.has(containers[of]), `no list or object ${of} came before`);
      return values.get(containers[of]);
    }
    if (kind === "numbers") return array(of).data;
    if (kind === "dict") {
      const [keys, content] = of.map(value);
      return new Value(kind, keys.map((key, i) => [key, content[i]]));
    }
    if (kind === "int") return of[0] === "-" ? -BigInt(of.slice(1)) : BigInt(of);
    if (kind === "float") return Float.ofBits(BigInt(`0x${of}`));
    if (kind === "str") return wtf8(Buffer.from(of, "hex"));
    if (kind === "bytes") return new Value(kind, bytesOf(of).toString("hex"));
    if (kind === "pickle") return new Value(kind, of[1]);
    if (kind === "instance") return new Value(kind, [of[0], of[1], value(of[2])]);
    if (kind === "state" || kind === "codec") return new Value(kind, [of[0], value(of[1])]);
    need(
      kind === "tuple" || CODECS.has(kind) || LIBRARY.test(kind),
      `this reader does not know the kind ${kind}`,
    );
    return new Value(kind, value(of));
  }

  function bytesOf(of) {
    return typeof of === "string" ? Buffer.from(of, "hex") : Buffer.from(array(of).data.map(Number));
  }

  return value(whole);
}

// UTF-8 that has lone surrogates as they are.
function wtf8(bytes) {
  const parts = bytes.toString("latin1").split(/(\xed[\xa0-\xbf][\x80-\xbf])/);
  const decoded = parts.map((part, i) => {
    const [a, b, c] = Buffer.from(part, "latin1");
    if (i % 2) return String.fromCharCode(((a & 15) << 12) | ((b & 63) << 6) | (c & 63));
    return utf8.decode(Buffer.from(part, "latin1"));
  });
  return decoded.join("");
}

// Printing.

function print(value) {
  const places = new Map();
  const kind = (name, of) => `{"$":"${name}","of":${of}}`;

  function list(values, at) {
    return `[${values.map((item, i) => show(item, `${at}/${i}`)).join(",")}]`;
  }

  function float({ value, bits }) {
    if (Number.isFinite(value)) {
      const text = Object.is(value, -0) ? "-0" : String(value);
      return /^-?\d+$/.test(text) ? `${text}.0` : text;
    }
    return kind("float", `"${bits.toString(16).padStart(16, "0")}"`);
  }

  function show(value, at) {
    if (typeof value === "bigint") return String(value);
    if (value instanceof Float) return float(value);
    if (value === null || typeof value !== "object") return JSON.stringify(value);
    if (places.has(value)) return kind("same", JSON.stringify(places.get(value)));
    places.set(value, at);
    if (Array.isArray(value)) return list(value, at);
    if (value instanceof Map) {
      const pairs = [...value].map(
        ([key, item]) => `${JSON.stringify(key)}:${show(item, `${at}/${key}`)}`,
      );
      return `{${pairs.join(",")}}`;
    }
    if (value.kind === "array") {
      const { data, ...rest } = value.of;
      return kind("array", `${JSON.stringify(rest).slice(0, -1)},"data":${list(data, at)}}`);
    }
    return kind(value.kind, show(value.of, `${at}/of`));
  }

  return show(value, "");
}

// Stores.

function readStore(directory, node, reference) {
  const name = reference.get("name");
  const store = join(directory, name);
  const bytes = readFileSync(join(store, "zarr.json"));
  need(sha256(bytes) === reference.get("sha256"), `${name}/zarr.json does not have its SHA-256`);
  const document = parse(utf8.decode(bytes));
  const documents = document.get("consolidated_metadata").get("metadata");
  const entry = document.get("attributes").get("/jobrunner");
  need(entry.get("format") === 1, `${name} has format ${entry.get("format")}`);
  const own = entry.get("sha256");
  const before = Buffer.from(bytes.toString("latin1").replace(own, "0".repeat(64)), "latin1");
  need(sha256(before) === own, `${name}/zarr.json does not have its own SHA-256`);
  need(entry.get("node") === node, `${name} is of the node ${entry.get("node")}`);

  const at = (item) => readArray(store, documents, item.get("path"), item.get("files"));
  const stacks = new Map();
  const read = (item) => {
    if (!Array.isArray(item)) return at(item);
    const [stack, row] = item;
    if (!stacks.has(stack)) stacks.set(stack, at(entry.get("stacks")[stack]));
    return rowOf(stacks.get(stack), row);
  };
  const blobs = [...entry.get("blobs")].map(([blob, about]) => {
    const value = grow(about.get("tree"), (index) => read(about.get("arrays")[index]));
    return `${JSON.stringify(blob)}:${print(value)}`;
  });
  return `{${blobs.join(",")}}`;
}

function main(directory, wanted) {
  const recorded = replay(readLog(directory));
  const epochs = [...recorded.keys()].sort(compare);
  const epoch = wanted === undefined ? epochs.at(-1) : /^\d+$/.test(wanted) ? +wanted : wanted;
  need(recorded.has(epoch), `${directory} has no epoch ${epoch ?? ""}`);
  const pins = Object.fromEntries(epochs.map((at) => [at, [...recorded.get(at).pins].sort()]));
  const nodes = [...recorded.get(epoch).stores].map(
    ([node, reference]) => `${JSON.stringify(node)}:${readStore(directory, node, reference)}`,
  );
  const about = JSON.stringify({ epochs, pins, epoch }).slice(0, -1);
  process.stdout.write(`${about},"nodes":{${nodes.join(",")}}}\n`);
}

try {
  main(process.argv[2], process.argv[3]);
} catch (error) {
  if (!(error instanceof Refused)) throw error;
  process.stderr.write(`refused: ${error.message}\n`);
  process.exitCode = 1;
}
