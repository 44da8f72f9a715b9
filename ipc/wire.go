package ipc

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"unicode/utf8"
)

// wire reads or writes one message. One walk over its fields serves both directions, so the two
// cannot differ in order or limits. The first error stops it: later steps do nothing. Writing never
// changes the message, so several goroutines may encode one message.
type wire struct {
	decoding bool
	buf      []byte // decoding: what is left to read; encoding: what is written, after the caller's bytes
	message  string
	list     string // decoding or encoding an element of this list
	index    int
	err      *MalformedError
}

func (w *wire) fail(field, format string, args ...any) {
	if w.err != nil {
		return
	}
	if w.list != "" && field != w.list {
		if field != "" {
			field = "." + field
		}
		field = fmt.Sprintf("%s[%d]%s", w.list, w.index, field)
	}
	w.err = &MalformedError{Message: w.message, Field: field, Detail: fmt.Sprintf(format, args...)}
}

// take consumes the n bytes of a header that a reader of msgpack.go found, or fails.
func (w *wire) take(field, want string, n int) bool {
	switch n {
	case wrongType:
		w.fail(field, "0x%02x: not %s in its shortest form", w.buf[0], want)
		return false
	case cutShort:
		w.fail(field, "the message ends within it")
		return false
	}
	w.buf = w.buf[n:]
	return true
}

// num reads or writes a number from least to most.
func num[T uint8 | uint32 | uint64](w *wire, field string, p *T, least, most T) {
	if w.err != nil {
		return
	}
	v := uint64(*p)
	if w.decoding {
		var n int
		v, n = readUint(w.buf)
		if !w.take(field, "a uint", n) {
			return
		}
	}
	if v < uint64(least) || v > uint64(most) {
		w.fail(field, "%d, allowed is %d to %d", v, least, most)
		return
	}
	if w.decoding {
		*p = T(v)
	} else {
		w.buf = appendUint(w.buf, v)
	}
}

func (w *wire) flag(field string, p *bool) {
	var v uint8
	if *p {
		v = 1
	}
	num(w, field, &v, 0, 1)
	if w.decoding && w.err == nil {
		*p = v == 1
	}
}

// length checks a header's length before anything is allocated for it.
func (w *wire) length(field, unit string, v uint64, least, most int) (int, bool) {
	if v < uint64(least) || v > uint64(most) {
		w.fail(field, "%d %s, allowed is %d to %d", v, unit, least, most)
		return 0, false
	}
	return int(v), true
}

// bytes returns the n bytes after a header.
func (w *wire) bytes(field string, n int) []byte {
	if n > len(w.buf) {
		w.fail(field, "%d bytes, only %d left in the message", n, len(w.buf))
		return nil
	}
	b := w.buf[:n:n]
	w.buf = w.buf[n:]
	return b
}

// bin reads or writes a binary of least to most bytes. A decoded one lies in the frame; nil if
// empty.
func (w *wire) bin(field string, p *[]byte, least, most int) {
	if w.err != nil {
		return
	}
	if !w.decoding {
		if _, ok := w.length(field, "bytes", uint64(len(*p)), least, most); ok {
			w.buf = appendBin(w.buf, *p)
		}
		return
	}
	v, n := binHeader.read(w.buf, false)
	if !w.take(field, "a bin", n) {
		return
	}
	size, ok := w.length(field, "bytes", v, least, most)
	if !ok {
		return
	}
	*p = w.bytes(field, size)
	if size == 0 {
		*p = nil
	}
}

func (w *wire) bin16(field string, p *[16]byte) {
	b := p[:]
	w.bin(field, &b, 16, 16)
	if w.decoding && w.err == nil {
		copy(p[:], b)
	}
}

// str reads or writes a UTF-8 string of least to most bytes.
func (w *wire) str(field string, p *string, least, most int) {
	if w.err != nil {
		return
	}
	if !w.decoding {
		w.appendStr(field, *p, least, most)
		return
	}
	v, n := strHeader.read(w.buf, false)
	if !w.take(field, "a str", n) {
		return
	}
	size, ok := w.length(field, "bytes", v, least, most)
	if !ok {
		return
	}
	b := w.bytes(field, size)
	if !utf8.Valid(b) {
		w.fail(field, "not UTF-8")
		return
	}
	*p = string(b)
}

func (w *wire) appendStr(field, s string, least, most int) {
	if _, ok := w.length(field, "bytes", uint64(len(s)), least, most); !ok {
		return
	}
	if !utf8.ValidString(s) {
		w.fail(field, "not UTF-8")
		return
	}
	w.buf = appendStr(w.buf, s)
}

// cutText returns an explanation for people as it is written: UTF-8 of at most MaxText bytes.
func cutText(text string) string {
	s := strings.ToValidUTF8(text, "?")
	if len(s) <= MaxText {
		return s
	}
	end := MaxText
	for !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end]
}

// array reads or writes the header of an array of least to most elements; size is how many the
// writer has.
func (w *wire) array(field string, size, least, most int) int {
	if w.err != nil {
		return 0
	}
	v := uint64(size)
	if w.decoding {
		var n int
		v, n = arrayHeader.read(w.buf, false)
		if !w.take(field, "an array", n) {
			return 0
		}
	}
	n, ok := w.length(field, "elements", v, least, most)
	if ok && !w.decoding {
		w.buf = appendArray(w.buf, n)
	}
	return n
}

// elements reads or writes the header of a list, whose elements have at least elemBytes each: one
// that announces more than the frame can hold is refused before anything is allocated.
func (w *wire) elements(f *field, size, elemBytes int) int {
	n := w.array(f.name, size, int(f.least), int(f.most))
	if w.decoding && w.err == nil && n*elemBytes > len(w.buf) {
		w.fail(f.name, "%d elements, only %d bytes left in the message", n, len(w.buf))
	}
	if w.err != nil {
		return 0
	}
	return n
}

// Errors to branch on. The cause of a connection's end wraps one of them, io.EOF or the system's
// error.
var (
	ErrPeerDied = errors.New("the peer's process died")
	ErrStalled  = errors.New("the peer left a frame unfinished")
	ErrClosed   = errors.New("closed")
	ErrTimeout  = errors.New("no answer in time")
)

// MalformedError describes what is wrong with a message, and what is allowed.
type MalformedError struct {
	Message string // its name in docs/PROTOCOL.md
	Field   string // its path in the message, "" for the message as a whole
	Detail  string // what was found, and what is allowed
}

func (e *MalformedError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("%s: %s", e.Message, e.Detail)
	}
	return fmt.Sprintf("%s: %s: %s", e.Message, e.Field, e.Detail)
}

// Guard makes a panic a *MalformedError that has its stack. It is deferred by what reads or checks
// a message of a peer, and holds nothing that peers share: a defect there costs that peer's
// message, anywhere else it ends the process.
func Guard(err *error) {
	if v := recover(); v != nil {
		*err = &MalformedError{"message", "",
			fmt.Sprintf("it makes its reader panic, a defect of the agent: %v\n%s", v, debug.Stack())}
	}
}
