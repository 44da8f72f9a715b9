package kernel

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// A machine for the few instructions that copy.ptx has, so that the effects of its lines can be
// compared with the intended ones where there is no GPU. It knows types: a register is used only as
// what it was declared to be, a load or store is aligned as the hardware wants it, and all memory
// is in ranges that the test gives.

// program is a module's one function, read.
type program struct {
	registers map[string]int // name: bits; 1 is a predicate
	labels    map[string]int
	code      []instruction
}

type instruction struct {
	line  int
	guard string // a predicate, or empty
	op    []string
	args  []string
}

var (
	comment   = regexp.MustCompile(`//.*`)
	labelled  = regexp.MustCompile(`^([A-Z]+):$`)
	declared  = regexp.MustCompile(`^\.reg \.(pred|u16|u32|u64) (.*);$`)
	guarded   = regexp.MustCompile(`^@(%\w+) (.*)$`)
	operation = regexp.MustCompile(`^([\w.]+)(?: (.*))?;$`)
	vector    = regexp.MustCompile(`\{([^}]*)\}`)
)

var bitsOf = map[string]int{"pred": 1, "u8": 8, "u16": 16, "u32": 32, "b32": 32, "u64": 64, "s64": 64, "b64": 64}

// read reads the body of the function.
func read(text string) (*program, error) {
	p := &program{registers: map[string]int{}, labels: map[string]int{}}
	_, body, found := strings.Cut(text, "\n{\n")
	if !found {
		return nil, fmt.Errorf("no function")
	}
	for i, line := range strings.Split(body, "\n") {
		line = strings.TrimSpace(comment.ReplaceAllString(line, ""))
		if line == "}" {
			return p, nil
		}
		if err := p.read(i+1, line); err != nil {
			return nil, fmt.Errorf("line %d of the body: %w", i+1, err)
		}
	}
	return nil, fmt.Errorf("the function does not end")
}

func (p *program) read(number int, line string) error {
	if line == "" {
		return nil
	}
	if m := labelled.FindStringSubmatch(line); m != nil {
		p.labels[m[1]] = len(p.code)
		return nil
	}
	if m := declared.FindStringSubmatch(line); m != nil {
		for name := range strings.SplitSeq(m[2], ", ") {
			p.registers[name] = bitsOf[m[1]]
		}
		return nil
	}
	in := instruction{line: number}
	if m := guarded.FindStringSubmatch(line); m != nil {
		in.guard, line = m[1], m[2]
	}
	m := operation.FindStringSubmatch(line)
	if m == nil {
		return fmt.Errorf("cannot read %q", line)
	}
	in.op = strings.Split(m[1], ".")
	in.args = arguments(m[2])
	p.code = append(p.code, in)
	return nil
}

// arguments splits at commas; those of a vector stay together.
func arguments(text string) []string {
	if text == "" {
		return nil
	}
	text = vector.ReplaceAllStringFunc(text, func(v string) string { return strings.ReplaceAll(v, ", ", " ") })
	return strings.Split(text, ", ")
}

// launch is what all threads of a launch share.
type launch struct {
	*program
	memory          *memory
	params          map[string]uint64
	blocks, threads uint32
}

// thread is one of them.
type thread struct {
	*launch
	block, number uint32
	value         map[string]uint64
	at            int
}

// maxSteps is how many instructions a thread may take: one that takes more does not end.
const maxSteps = 1 << 20

// run runs all threads of a launch, one after the other.
func (l *launch) run() error {
	for block := range l.blocks {
		for number := range l.threads {
			t := &thread{launch: l, block: block, number: number, value: map[string]uint64{}}
			if err := t.run(); err != nil {
				return fmt.Errorf("block %d, thread %d: %w", block, number, err)
			}
		}
	}
	return nil
}

func (t *thread) run() error {
	for range maxSteps {
		if t.at >= len(t.code) {
			return fmt.Errorf("ran over the end")
		}
		in := &t.code[t.at]
		t.at++
		if in.op[0] == "ret" {
			return nil
		}
		if err := t.step(in); err != nil {
			return fmt.Errorf("line %d of the body, %s: %w", in.line, strings.Join(in.op, "."), err)
		}
	}
	return fmt.Errorf("does not end")
}

func (t *thread) step(in *instruction) error {
	if in.guard != "" {
		taken, err := t.get(in.guard, 1)
		if err != nil || taken == 0 {
			return err
		}
	}
	last := in.op[len(in.op)-1]
	switch in.op[0] {
	case "bra":
		to, found := t.labels[in.args[0]]
		if !found {
			return fmt.Errorf("no label %s", in.args[0])
		}
		t.at = to
		return nil
	case "ld", "st":
		return t.move(in)
	case "setp":
		return t.compare(in, bitsOf[last])
	case "cvt":
		return t.unary(in, bitsOf[in.op[1]], bitsOf[last], func(a uint64) uint64 { return a })
	case "cvta", "mov":
		return t.unary(in, bitsOf[last], bitsOf[last], func(a uint64) uint64 { return a })
	case "neg":
		return t.unary(in, bitsOf[last], bitsOf[last], func(a uint64) uint64 { return -a })
	case "mad":
		return t.multiplyAdd(in)
	case "mul":
		if in.op[1] == "wide" {
			return t.binary(in, 64, 32, func(a, b uint64) uint64 { return a * b })
		}
	}
	f, found := binaries[in.op[0]]
	if !found {
		return fmt.Errorf("not known here")
	}
	return t.binary(in, bitsOf[last], bitsOf[last], f)
}

var binaries = map[string]func(a, b uint64) uint64{
	"add": func(a, b uint64) uint64 { return a + b }, "sub": func(a, b uint64) uint64 { return a - b },
	"mul": func(a, b uint64) uint64 { return a * b }, "and": func(a, b uint64) uint64 { return a & b },
	"xor": func(a, b uint64) uint64 { return a ^ b }, "shl": func(a, b uint64) uint64 { return a << b },
	"shr": func(a, b uint64) uint64 { return a >> b }, "min": func(a, b uint64) uint64 { return min(a, b) },
}

// unary and binary are instructions whose operands have from bits and whose result has to.
func (t *thread) unary(in *instruction, to, from int, f func(uint64) uint64) error {
	a, err := t.get(in.args[1], from)
	if err != nil {
		return err
	}
	return t.set(in.args[0], to, f(a))
}

func (t *thread) binary(in *instruction, to, from int, f func(a, b uint64) uint64) error {
	a, err := t.get(in.args[1], from)
	if err != nil {
		return err
	}
	b, err := t.get(in.args[2], from)
	if err != nil {
		return err
	}
	return t.set(in.args[0], to, f(a, b))
}

func (t *thread) multiplyAdd(in *instruction) error {
	c, err := t.get(in.args[3], 32)
	if err != nil {
		return err
	}
	return t.binary(in, 32, 32, func(a, b uint64) uint64 { return a*b + c })
}

func (t *thread) compare(in *instruction, bits int) error {
	return t.binary(in, 1, bits, func(a, b uint64) uint64 {
		if in.op[1] == "ge" && a >= b || in.op[1] == "ne" && a != b {
			return 1
		}
		return 0
	})
}

// get returns the value of a register, a number or a special register, which has so many bits.
func (t *thread) get(name string, bits int) (uint64, error) {
	special := map[string]uint32{"%tid.x": t.number, "%ntid.x": t.threads, "%ctaid.x": t.block, "%nctaid.x": t.blocks}
	if v, found := special[name]; found && bits == 32 {
		return uint64(v), nil
	}
	if !strings.HasPrefix(name, "%") {
		return strconv.ParseUint(name, 10, bits)
	}
	v, written := t.value[name]
	if t.registers[name] != bits || !written {
		return 0, fmt.Errorf("%s has %d bits, want %d, and was written: %v", name, t.registers[name], bits, written)
	}
	return v, nil
}

func (t *thread) set(name string, bits int, v uint64) error {
	if t.registers[name] != bits {
		return fmt.Errorf("%s has %d bits, want %d", name, t.registers[name], bits)
	}
	if bits < 64 {
		v &= 1<<bits - 1
	}
	t.value[name] = v
	return nil
}

// move executes ld and st, of parameters and of memory.
func (t *thread) move(in *instruction) error {
	last := in.op[len(in.op)-1]
	where, what := in.args[1], in.args[0]
	if in.op[0] == "st" {
		where, what = what, where
	}
	where = strings.Trim(where, "[]")
	if in.op[1] == "param" {
		v, found := t.params[where]
		if !found {
			return fmt.Errorf("no parameter %s", where)
		}
		return t.set(what, bitsOf[last], v)
	}
	registers := strings.Fields(strings.Trim(what, "{}"))
	width := bitsOf[last] / 8
	if vector := in.op[len(in.op)-2] == "v4"; vector != (len(registers) == 4) {
		return fmt.Errorf("%d registers", len(registers))
	}
	mem, err := t.reach(where, width*len(registers))
	if err != nil {
		return err
	}
	for i, name := range registers {
		if err := t.moveOne(in.op[0], name, mem[i*width:(i+1)*width]); err != nil {
			return err
		}
	}
	return nil
}

// reach returns n bytes at an address, a register and a number, aligned to n.
func (t *thread) reach(where string, n int) ([]byte, error) {
	register, add, _ := strings.Cut(where, "+")
	at, err := t.get(register, 64)
	if err == nil && add != "" {
		var more uint64
		more, err = strconv.ParseUint(add, 10, 64)
		at += more
	}
	if err != nil {
		return nil, err
	}
	if at%uint64(n) != 0 {
		return nil, fmt.Errorf("%d bytes at %#x: misaligned", n, at)
	}
	return t.memory.at(at, n)
}

// moveOne moves a register's bytes; a single byte is in a register of 16 bits, as there are no
// smaller ones.
func (t *thread) moveOne(op, name string, mem []byte) error {
	bits := max(len(mem)*8, 16)
	var whole [8]byte
	if op == "ld" {
		copy(whole[:], mem)
		return t.set(name, bits, binary.LittleEndian.Uint64(whole[:]))
	}
	v, err := t.get(name, bits)
	binary.LittleEndian.PutUint64(whole[:], v)
	copy(mem, whole[:])
	return err
}

// memory is ranges of addresses.
type memory struct {
	start []uint64
	bytes [][]byte
}

func (m *memory) add(start uint64, bytes []byte) {
	m.start, m.bytes = append(m.start, start), append(m.bytes, bytes)
}

func (m *memory) at(at uint64, n int) ([]byte, error) {
	for i, start := range m.start {
		if off := at - start; at >= start && off+uint64(n) <= uint64(len(m.bytes[i])) {
			return m.bytes[i][off : off+uint64(n)], nil
		}
	}
	return nil, fmt.Errorf("%d bytes at %#x: no memory is there", n, at)
}
