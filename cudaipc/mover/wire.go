package mover

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
)

// The messages between an agent and its mover. Both are the same binary, so the form has no
// versions: one byte of kind, eight of number (a request's, or a ticket), and fields in
// little-endian order, as the functions below put them.
const (
	msgSetup  byte = iota + 1 // agent: JSON of Setup, with the arena's descriptor. Answered when the device is open
	msgImport                 // agent: an Import, with its descriptors; the proof's first
	msgClose                  // agent: a peer
	msgPoll                   // agent: waits
	msgCopy                   // agent: a copy; its number is the ticket
	msgPing                   // agent
	msgInfo                   // agent: asks for the state of the device
	msgHello                  // mover: its build, before anything else
	msgAnswer                 // mover: of setup, import and close
	msgStates                 // mover: of a poll
	msgDone                   // mover: the end of a copy
	msgPong                   // mover
	msgInfoIs                 // mover: of msgInfo, JSON or nothing
	msgLost                   // mover: its device is lost (ErrLost), the agent ends it
	msgSum                    // agent: a sample; its number is the ticket. Its end is msgDone
	msgCancel                 // agent: the Import with this number is cancelled
)

const headBytes = 9 // bytes of kind and number

func putHead(b []byte, kind byte, number uint64) []byte {
	return binary.LittleEndian.AppendUint64(append(b[:0], kind), number)
}

func put8(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

func put32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func put64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func putText(b []byte, s string) []byte { return append(put32(b, uint32(len(s))), s...) }

// fields decodes these fields. After the first field that is missing or invalid, all others are
// zero.
type fields struct {
	rest []byte
	bad  bool
}

func (f *fields) take(n int) []byte {
	if f.bad || n < 0 || n > len(f.rest) {
		f.bad = true
		return nil
	}
	b := f.rest[:n]
	f.rest = f.rest[n:]
	return b
}

func (f *fields) u8() byte {
	if b := f.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (f *fields) flag() bool {
	v := f.u8()
	f.bad = f.bad || v > 1
	return v == 1
}

func (f *fields) u32() uint32 {
	if b := f.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (f *fields) u64() uint64 {
	if b := f.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// count reads the length of a list whose elements have at least each bytes.
func (f *fields) count(each int) int {
	n := int(f.u32())
	if n*each > len(f.rest) {
		f.bad = true
		return 0
	}
	return n
}

func (f *fields) bytes() []byte { return f.take(f.count(1)) }

// end returns an error unless all fields were there and nothing else was.
func (f *fields) end(what string) error {
	if f.bad || len(f.rest) > 0 {
		return fmt.Errorf("%s: %w", what, errWire)
	}
	return nil
}

// sentinels are the errors that keep their meaning on the wire; their numbers are their places.
var sentinels = [...]error{
	nil, cudaipc.ErrPeer, cudaipc.ErrRange, cudaipc.ErrBusy, cudaipc.ErrKind, cudaipc.ErrTicket, cudaipc.ErrNoCUDA,
}

// deviceError is an error of the mover's device in the agent.
type deviceError struct {
	text     string
	sentinel error
}

func (e *deviceError) Error() string { return e.text }
func (e *deviceError) Unwrap() error { return e.sentinel }

// putError puts whether there is an error, which sentinel it wraps, and its text.
func putError(b []byte, err error) []byte {
	if err == nil {
		return append(b, 0)
	}
	which := 0
	for i := 1; i < len(sentinels); i++ {
		if errors.Is(err, sentinels[i]) {
			which = i
			break
		}
	}
	return putText(append(b, 1, byte(which)), err.Error())
}

func (f *fields) error() error {
	if !f.flag() {
		return nil
	}
	which := int(f.u8())
	text := string(f.bytes())
	if which >= len(sentinels) {
		f.bad = true
		return nil
	}
	return &deviceError{text, sentinels[which]}
}

func putSetup(b []byte, number uint64, s *Setup) ([]byte, error) {
	text, err := json.Marshal(s)
	return append(putHead(b, msgSetup, number), text...), err
}
