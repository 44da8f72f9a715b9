package ipc

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"unicode"
)

const maxFields = 15 // of any message: its array header is one byte

// messages are the messages by number, and numbersOf their numbers by the type of pointers to them.
// A message is written as an array of its number and its fields in their order; a struct in a list,
// as an array of its fields.
var messages, numbersOf = makeMessages(map[uint8]any{
	1: Hello{}, 2: Welcome{}, 3: Register{}, 4: Regions{}, 5: Segments{}, 6: Registered{}, 7: Unregister{},
	8: Release{}, 9: Save{}, 10: Load{}, 11: Cancel{}, 12: Reset{}, 13: Ping{}, 14: Done{}, 15: Cancelled{},
	16: Pong{}, 17: ResetDone{}, 18: Epoch{}, 19: Error{}, 20: Switches{}, 21: Unregistered{}, 24: Offer{},
	25: Offered{}, 26: Delivered{}, 27: Stages{}, 28: StagedLoad{}, 29: Hint{}, 30: Steps{}, 31: Budget{},
	32: Hinted{}, 37: BlockTokens{}, 38: NextEvents{}, 39: BlockEvents{},
})

// limits are the limits that tags name, besides numbers.
var limits = map[string]uint64{
	"Version": Version, "MaxFrame": MaxFrame, "MaxHashLen": MaxHashLen, "MaxName": MaxName,
	"MaxText": MaxText, "MaxIdentityPairs": MaxIdentityPairs, "MaxIdentityBytes": MaxIdentityBytes,
	"MaxGroups": MaxGroups, "MaxGroups-1": MaxGroups - 1, "MaxWorld": MaxWorld, "MaxWorld-1": MaxWorld - 1,
	"MaxShards": MaxShards, "MaxShards-1": MaxShards - 1, "MaxRegions": MaxRegions,
	"MaxRegionsMessage": MaxRegionsMessage, "MaxSegments": MaxSegments, "MaxSegmentsMessage": MaxSegmentsMessage,
	"MaxSections": MaxSections, "MaxJobBlocks": MaxJobBlocks, "MaxJobHashes": MaxJobBlocks * MaxHashLen,
	"MaxJobIDs": MaxJobBlocks * 4, "MaxJobBits": MaxJobBlocks / 8, "MaxReleases": MaxReleases, "MaxHandle": MaxHandle,
	"MaxEvents": MaxEvents, "MaxSocketPath": MaxSocketPath, "MaxTransferName": MaxTransferName,
	"MaxTransferMS": MaxTransferMS, "MaxStageWords": MaxStageWords, "MaxStageWords-1": MaxStageWords - 1,
	"MaxStagesBytes": MaxSegments * 2, "MaxHintMS": MaxHintMS, "MaxHintActions": MaxHintActions,
	"MaxHintID": MaxHintID, "MaxPriority": MaxPriority, "MaxFinish": MaxFinish, "MaxPeerAddress": MaxPeerAddress,
	"StepBytes": StepBytes, "MaxStepsBytes": MaxSteps * StepBytes, "MaxBudget": MaxBudget, "MaxExtra": MaxExtra,
	"MaxEventBlocks": MaxEventBlocks, "MaxEventHashes": MaxEventBlocks * MaxHashLen, "RoleWorker": RoleWorker,
	"RegionFD": RegionFD, "RegionCUDAFD": RegionCUDAFD, "HintRetain": HintRetain, "HintFetch": HintFetch,
	"HintAccepted": HintAccepted, "HintMissing": HintMissing, "EventsVoid": EventsVoid, "EventStored": EventStored,
	"EventRemoved": EventRemoved, "MediumMemory": MediumMemory,
}

// message is how a struct is written.
type message struct {
	of     reflect.Type
	name   string // in docs/PROTOCOL.md
	fields []field
	bytes  int // that it has at least, with its header
}

// field is how a field of a struct is written.
type field struct {
	name        string
	least, most uint64
	each        uint64   // the most of a number in a list
	of          *message // of a struct, or a list of structs
	text        bool     // for people: cut when it is written, if it is too long
}

// checked is implemented by what has more limits than those of its fields.
type checked interface{ check(w *wire) }

func makeMessages(all map[uint8]any) (by [math.MaxUint8 + 1]*message, of map[reflect.Type]uint8) {
	of = map[reflect.Type]uint8{}
	for typ, v := range all {
		by[typ] = messageOf(reflect.TypeOf(v), "")
		of[reflect.PointerTo(by[typ].of)] = typ
	}
	return by, of
}

func messageOf(t reflect.Type, prefix string) *message {
	m := &message{of: t, name: strings.ToUpper(wireName(t.Name())), bytes: 1}
	for i := range t.NumField() {
		f := t.Field(i)
		one := field{
			name: prefix + wireName(f.Name), least: limit(f, "least", 0), most: limit(f, "most", math.MaxUint64),
			each: limit(f, "each", math.MaxUint64), text: f.Tag.Get("most") == "MaxText",
		}
		if name := f.Tag.Get("name"); name != "" {
			one.name = name
		}
		switch e := f.Type; {
		case e.Kind() == reflect.Slice && e.Elem().Kind() == reflect.Struct:
			one.of = messageOf(e.Elem(), "")
		case e.Kind() == reflect.Pointer:
			one.of = messageOf(e.Elem(), one.name+".")
		case e.Kind() == reflect.Slice && e.Elem().Kind() == reflect.Uint32:
			one.each = min(one.each, math.MaxUint32)
		case e.Kind() <= reflect.Uint64 && e.Kind() >= reflect.Uint8:
			one.most = min(one.most, math.MaxUint64>>(64-e.Bits()))
		}
		m.fields, m.bytes = append(m.fields, one), m.bytes+1
	}
	return m
}

func limit(f reflect.StructField, tag string, none uint64) uint64 {
	text := f.Tag.Get(tag)
	if text == "" {
		return none
	}
	if n, named := limits[text]; named {
		return n
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		panic(fmt.Sprintf("ipc: limit %q of field %s", text, f.Name))
	}
	return n
}

// wireName returns MaxFrame as max_frame.
func wireName(name string) string {
	var b strings.Builder
	for i, c := range name {
		if i > 0 && unicode.IsUpper(c) && unicode.IsLower(rune(name[i-1])) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(c))
	}
	return b.String()
}

// Encode appends msg, a pointer to one of the session's messages, to dst: a frame without its
// length. It refuses what Decode would refuse with a *MalformedError, and then dst is unchanged. It
// only reads msg.
func Encode(dst []byte, msg any) ([]byte, error) {
	w := wire{buf: dst, message: "message"}
	if typ, is := numbersOf[reflect.TypeOf(msg)]; is {
		m := messages[typ]
		w.message = m.name
		w.buf = appendUint(appendArray(w.buf, 1+len(m.fields)), uint64(typ))
		w.walk(m, reflect.ValueOf(msg).Elem())
	} else {
		w.fail("type", "%T is no message", msg)
	}
	if n := len(w.buf) - len(dst); n > MaxFrame {
		w.fail("", "%d bytes, allowed is 1 to %d", n, MaxFrame)
	}
	if w.err != nil {
		return dst, w.err
	}
	return w.buf, nil
}

// Decode reads one frame. It returns a pointer to one of the session's messages, whose byte slices
// lie in frame, or a *MalformedError. Encode writes what Decode accepts as the same bytes.
func Decode(frame []byte) (read any, err error) {
	defer Guard(&err)
	w := wire{decoding: true, buf: frame, message: "message"}
	if len(frame) > MaxFrame {
		w.fail("", "%d bytes, allowed is 1 to %d", len(frame), MaxFrame)
	}
	count := w.array("", 0, 1, maxFields)
	var typ uint8
	num(&w, "type", &typ, 0, math.MaxUint8)
	m := messages[typ]
	if m == nil {
		w.fail("type", "%d is no message", typ)
		return nil, w.err
	}
	w.message = m.name
	if count != 1+len(m.fields) {
		w.fail("", "%d fields, allowed is %d", count, 1+len(m.fields))
	}
	msg := reflect.New(m.of)
	w.walk(m, msg.Elem())
	if w.err == nil && len(w.buf) > 0 {
		w.fail("", "%d bytes after the last field", len(w.buf))
	}
	if w.err != nil {
		return nil, w.err
	}
	return msg.Interface(), nil
}

// walk reads or writes the fields of a struct, and checks it as a whole.
func (w *wire) walk(m *message, v reflect.Value) {
	for i := range m.fields {
		w.field(&m.fields[i], v.Field(i))
	}
	if c, is := v.Addr().Interface().(checked); is && w.err == nil {
		c.check(w)
	}
}

func (w *wire) field(f *field, v reflect.Value) {
	if w.err != nil {
		return
	}
	switch p := v.Addr().Interface().(type) {
	case *uint8:
		num(w, f.name, p, uint8(f.least), uint8(f.most))
	case *uint32:
		num(w, f.name, p, uint32(f.least), uint32(f.most))
	case *uint64:
		num(w, f.name, p, f.least, f.most)
	case *bool:
		w.flag(f.name, p)
	case *[16]byte:
		w.bin16(f.name, p)
	case *[]byte:
		w.bin(f.name, p, int(f.least), int(f.most))
	case *string:
		if s := p; f.text && !w.decoding {
			cut := cutText(*s)
			p = &cut
		}
		w.str(f.name, p, int(f.least), int(f.most))
	case *[]uint32:
		numbers(w, f, p)
	case *[]uint64:
		numbers(w, f, p)
	default:
		if v.Kind() == reflect.Pointer {
			w.optional(f, v)
		} else {
			w.structs(f, v)
		}
	}
}

// numbers reads or writes a list of numbers.
func numbers[T uint32 | uint64](w *wire, f *field, p *[]T) {
	if n := w.elements(f, len(*p), 1); w.decoding && n > 0 {
		*p = make([]T, n)
	}
	for i := range *p {
		w.list, w.index = f.name, i
		num(w, "", &(*p)[i], 0, T(f.each))
	}
	w.list = ""
}

// structs reads or writes a list of structs.
func (w *wire) structs(f *field, v reflect.Value) {
	if n := w.elements(f, v.Len(), f.of.bytes); w.decoding && n > 0 {
		v.Set(reflect.MakeSlice(v.Type(), n, n))
	}
	for i := range v.Len() {
		w.list, w.index = f.name, i
		w.array("", len(f.of.fields), len(f.of.fields), len(f.of.fields))
		w.walk(f.of, v.Index(i))
	}
	w.list = ""
}

// optional reads or writes a struct that may be absent: then it is an empty array.
func (w *wire) optional(f *field, v reflect.Value) {
	size := 0
	if !v.IsNil() {
		size = len(f.of.fields)
	}
	n := w.array(f.name, size, 0, len(f.of.fields))
	if n == 0 || w.err != nil {
		return
	}
	if n != len(f.of.fields) {
		w.fail(f.name, "%d elements, allowed is 0 or %d", n, len(f.of.fields))
		return
	}
	if w.decoding {
		v.Set(reflect.New(f.of.of))
	}
	w.walk(f.of, v.Elem())
}

// The checks of what a field's own limits do not say.

func (m *Hello) check(w *wire) {
	if m.MinVersion > m.MaxVersion {
		w.fail("min_version", "%d, allowed is 1 to max_version %d", m.MinVersion, m.MaxVersion)
	}
}

func (m *Register) check(w *wire) {
	bytes, last := 0, ""
	for i := range m.Identity {
		p := &m.Identity[i]
		if last >= p.Key {
			w.fail(fmt.Sprintf("identity[%d].key", i), "%.64q after %.64q, keys must be sorted and "+
				"distinct", p.Key, last)
		}
		last = p.Key
		bytes += len(p.Key) + len(p.Value)
	}
	if bytes > MaxIdentityBytes {
		w.fail("identity", "%d bytes of keys and values, allowed is 0 to %d", bytes, MaxIdentityBytes)
	}
}

// Descriptors returns how many file descriptors come with the message.
func (m *Regions) Descriptors() (n int) {
	for i := range m.List {
		if k := m.List[i].Kind; k == RegionFD || k == RegionCUDAFD {
			n++
		}
	}
	return n
}

func (m *Save) check(w *wire)       { checkSections(w, m.Sections) }
func (m *Load) check(w *wire)       { checkSections(w, m.Sections) }
func (m *StagedLoad) check(w *wire) { checkSections(w, m.Sections) }

func checkSections(w *wire, all []Section) {
	blocks := 0
	for i := range all {
		blocks += all[i].Len()
	}
	w.jobBlocks("sections", blocks)
}

func (w *wire) jobBlocks(field string, blocks int) {
	if blocks > MaxJobBlocks {
		w.fail(field, "%d blocks, allowed is 1 to %d", blocks, MaxJobBlocks)
	}
}

func (m *Section) check(w *wire) {
	w.run(m.Parent, m.HashLen, m.Hashes)
	if n := len(m.Hashes) / int(m.HashLen); len(m.Blocks) != n*4 {
		w.fail("blocks", "%d bytes, %d hashes need %d", len(m.Blocks), n, n*4)
	}
}

// Len returns the number of blocks of a section.
func (m *Section) Len() int { return len(m.Blocks) / 4 }

func (m *Stages) check(w *wire) { w.multiple("stages", m.List, 2) }
func (m *Steps) check(w *wire)  { w.multiple("steps", m.List, StepBytes) }

func (w *wire) multiple(field string, list []byte, of int) {
	if len(list)%of != 0 {
		w.fail(field, "%d bytes, no multiple of %d", len(list), of)
	}
}

func (m *BlockTokens) check(w *wire) {
	w.run(m.Parent, m.HashLen, m.Hashes)
	w.tokens(m.Tokens, m.HashLen, m.Hashes)
}

func (m *EventRun) check(w *wire) {
	w.run(m.Parent, m.HashLen, m.Hashes)
	if m.Kind == EventStored {
		w.tokens(m.Tokens, m.HashLen, m.Hashes)
	} else if len(m.Parent)+len(m.Tokens)+len(m.Extra) > 0 {
		w.fail("tokens", "parent, tokens or extra of removed blocks, allowed is none")
	}
}

// run checks the hashes of a run.
func (w *wire) run(parent []byte, hashLen uint8, hashes []byte) {
	n := int(hashLen)
	if len(parent) != 0 && len(parent) != n {
		w.fail("parent", "%d bytes, allowed is 0 or hash_len %d", len(parent), n)
	}
	if len(hashes)%n != 0 {
		w.fail("hashes", "%d bytes, no multiple of hash_len %d", len(hashes), n)
	}
}

// tokens checks that every block of a run has as many tokens.
func (w *wire) tokens(tokens []byte, hashLen uint8, hashes []byte) {
	blocks := len(hashes) / int(hashLen)
	if len(tokens) == 0 || blocks == 0 || len(tokens)%(4*blocks) != 0 {
		w.fail("tokens", "%d bytes, allowed is 4 for each token, as many for each of %d blocks",
			len(tokens), blocks)
	}
}

func (m *Hint) check(w *wire) {
	blocks := 0
	for i := range m.Chains {
		blocks += m.Chains[i].blocks()
	}
	w.jobBlocks("chains", blocks)
}

func (m *HintChain) check(w *wire) {
	w.run(nil, m.HashLen, m.Hashes)
	if n := len(m.Own); n != 0 && n != (m.blocks()+7)/8 {
		w.fail("own", "%d bytes, allowed is 0 or %d, a bit for each hash", n, (m.blocks()+7)/8)
	}
}

func (m *HintChain) blocks() int { return len(m.Hashes) / int(m.HashLen) }
