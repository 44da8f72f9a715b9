package ipc

import (
	"fmt"
	"math"
)

const maxFields = 15 // of any message: its array header is one byte

var messageNames = [...]string{TypeHello: "HELLO", TypeWelcome: "WELCOME", TypeRegister: "REGISTER",
	TypeRegions:  "REGIONS",
	TypeSegments: "SEGMENTS", TypeRegistered: "REGISTERED", TypeUnregister: "UNREGISTER", TypeRelease: "RELEASE",
	TypeSave: "SAVE", TypeLoad: "LOAD", TypeCancel: "CANCEL", TypeReset: "RESET", TypePing: "PING", TypeDone: "DONE",
	TypeCancelled: "CANCELLED", TypePong: "PONG", TypeResetDone: "RESET_DONE", TypeEpoch: "EPOCH", TypeError: "ERROR",
	TypeSwitches: "SWITCHES", TypeUnregistered: "UNREGISTERED",
	TypeOffer: "OFFER", TypeOffered: "OFFERED", TypeDelivered: "DELIVERED",
	TypeStages: "STAGES", TypeStagedLoad: "STAGED_LOAD", TypeHint: "HINT", TypeHinted: "HINTED",
	TypeSteps: "STEPS", TypeBudget: "BUDGET", TypeBlockTokens: "BLOCK_TOKENS", TypeNextEvents: "NEXT_EVENTS",
	TypeBlockEvents: "BLOCK_EVENTS"}

// Encode appends msg, a pointer to one of the session's messages, to dst: a frame without its
// length. It refuses what Decode would refuse with a *MalformedError, and then dst is unchanged. It
// only reads msg.
func Encode(dst []byte, version uint32, msg any) ([]byte, error) {
	w := wire{version: version, buf: dst, message: "message"}
	w.checkVersion()
	if w.err == nil {
		w.walk(msg)
	}
	if n := len(w.buf) - len(dst); n > MaxFrame {
		w.fail(ReasonTooLarge, "", "%d bytes, allowed is 1 to %d", n, MaxFrame)
	}
	if w.err != nil {
		return dst, w.err
	}
	return w.buf, nil
}

// Decode reads one frame. It returns a pointer to one of the session's messages, whose byte slices
// lie in frame, or a *MalformedError. Encode writes what Decode accepts as the same bytes.
func Decode(version uint32, frame []byte) (any, error) {
	w := wire{decoding: true, version: version, buf: frame, message: "message"}
	w.checkVersion()
	if len(frame) > MaxFrame {
		w.fail(ReasonTooLarge, "", "%d bytes, allowed is 1 to %d", len(frame), MaxFrame)
	}
	w.count = w.array("", 0, 1, maxFields)
	var typ uint8
	num(&w, "type", &typ, 0, math.MaxUint8)
	msg := newMessage(typ)
	if msg == nil {
		w.fail(ReasonVersion, "type", "%d is no message, allowed is %d to %d", typ, TypeHello, TypeBlockEvents)
		return nil, w.err
	}
	if w.err == nil {
		w.walk(msg)
	}
	if w.err == nil && len(w.buf) > 0 {
		w.fail(ReasonFields, "", "%d bytes after the last field", len(w.buf))
	}
	if w.err != nil {
		return nil, w.err
	}
	return msg, nil
}

func (w *wire) checkVersion() {
	if w.version < MinVersion || w.version > Version {
		w.fail(ReasonVersion, "version", "%d, allowed is %d to %d", w.version, MinVersion, Version)
	}
}

func newMessage(typ uint8) any {
	make, ok := makers[typ]
	if !ok {
		return nil
	}
	return make()
}

var makers = map[uint8]func() any{
	TypeHello: func() any { return new(Hello) }, TypeWelcome: func() any { return new(Welcome) },
	TypeRegister: func() any { return new(Register) }, TypeRegions: func() any { return new(Regions) },
	TypeSegments: func() any { return new(Segments) }, TypeRegistered: func() any { return new(Registered) },
	TypeUnregister: func() any { return new(Unregister) }, TypeRelease: func() any { return new(Release) },
	TypeSave: func() any { return new(Save) }, TypeLoad: func() any { return new(Load) },
	TypeCancel: func() any { return new(Cancel) }, TypeReset: func() any { return new(Reset) },
	TypePing: func() any { return new(Ping) }, TypeDone: func() any { return new(Done) },
	TypeCancelled: func() any { return new(Cancelled) }, TypePong: func() any { return new(Pong) },
	TypeResetDone: func() any { return new(ResetDone) }, TypeEpoch: func() any { return new(Epoch) },
	TypeError: func() any { return new(Error) }, TypeSwitches: func() any { return new(Switches) },
	TypeUnregistered: func() any { return new(Unregistered) },
	TypeOffer:        func() any { return new(Offer) }, TypeOffered: func() any { return new(Offered) },
	TypeDelivered: func() any { return new(Delivered) }, TypeStages: func() any { return new(Stages) },
	TypeStagedLoad: func() any { return new(StagedLoad) }, TypeHint: func() any { return new(Hint) },
	TypeHinted: func() any { return new(Hinted) },
	TypeSteps:  func() any { return new(Steps) }, TypeBudget: func() any { return new(Budget) },
	TypeBlockTokens: func() any { return new(BlockTokens) },
	TypeNextEvents:  func() any { return new(NextEvents) }, TypeBlockEvents: func() any { return new(BlockEvents) },
}

func (w *wire) walk(msg any) {
	switch m := msg.(type) {
	case interface{ walk(w *wire) }:
		m.walk(w)
	case *Unregister:
		w.request(TypeUnregister, &m.Req)
	case *Cancel:
		w.job(TypeCancel, &m.Job)
	case *Reset:
		w.request(TypeReset, &m.Req)
	case *Ping:
		w.request(TypePing, &m.Req)
	case *Cancelled:
		w.job(TypeCancelled, &m.Job)
	case *Pong:
		w.request(TypePong, &m.Req)
	default:
		w.fail(ReasonVersion, "type", "%s is no message", fmt.Sprintf("%T", msg))
	}
}

func (w *wire) request(typ uint8, req *uint32) {
	w.begin(typ, 2)
	num(w, "req", req, 0, math.MaxUint32)
}

func (w *wire) job(typ uint8, job *uint64) {
	w.begin(typ, 2)
	num(w, "job", job, 0, math.MaxUint64)
}

// The walks over the fields of messages that open, control and end a session (docs/PROTOCOL.md
// section 3).

func (m *Hello) walk(w *wire) {
	w.begin(TypeHello, 4)
	num(w, "min_version", &m.MinVersion, 1, math.MaxUint32)
	num(w, "max_version", &m.MaxVersion, 1, math.MaxUint32)
	w.str("software", &m.Software, 0, MaxName)
	if w.err == nil && m.MinVersion > m.MaxVersion {
		w.fail(ReasonRange, "min_version", "%d, allowed is 1 to max_version %d", m.MinVersion, m.MaxVersion)
	}
}

func (m *Welcome) walk(w *wire) {
	w.begin(TypeWelcome, 9)
	num(w, "version", &m.Version, MinVersion, Version)
	w.bin16("boot", &m.Boot)
	num(w, "session", &m.Session, 0, math.MaxUint64)
	num(w, "max_frame", &m.MaxFrame, 0, math.MaxUint32)
	num(w, "max_job_blocks", &m.MaxJobBlocks, 0, math.MaxUint32)
	num(w, "max_queue", &m.MaxQueue, 0, math.MaxUint32)
	num(w, "lease_bytes", &m.LeaseBytes, 0, math.MaxUint64)
	w.str("peer", &m.Peer, 0, MaxPeerAddress)
}

func (m *Release) walk(w *wire) {
	w.begin(TypeRelease, 2)
	list(w, "leases", &m.Leases, 0, MaxReleases, 1)
	for i := range m.Leases {
		w.elem("leases", i, 0)
		num(w, "", &m.Leases[i], 0, math.MaxUint64)
	}
	w.leave()
}

func (m *ResetDone) walk(w *wire) {
	w.begin(TypeResetDone, 5)
	num(w, "req", &m.Req, 0, math.MaxUint32)
	num(w, "status", &m.Status, 0, math.MaxUint8)
	w.text(&m.Text)
	num(w, "epoch", &m.Epoch, 0, math.MaxUint32)
}

func (m *Unregistered) walk(w *wire) {
	w.begin(TypeUnregistered, 4)
	num(w, "req", &m.Req, 0, math.MaxUint32)
	num(w, "status", &m.Status, 0, math.MaxUint8)
	w.text(&m.Text)
}

func (m *Error) walk(w *wire) {
	w.begin(TypeError, 3)
	num(w, "code", &m.Code, 0, math.MaxUint8)
	w.text(&m.Text)
}

func (m *Epoch) walk(w *wire) {
	w.begin(TypeEpoch, 2)
	num(w, "epoch", &m.Epoch, 0, math.MaxUint32)
}

func (m *Switches) walk(w *wire) {
	w.begin(TypeSwitches, 3)
	w.flag("loads", &m.Loads)
	w.flag("saves", &m.Saves)
}

func (m *Steps) walk(w *wire) {
	w.begin(TypeSteps, 2)
	w.bin("steps", &m.List, StepBytes, MaxSteps*StepBytes)
	if w.err == nil && len(m.List)%StepBytes != 0 {
		w.fail(ReasonLengths, "steps", "%d bytes, no multiple of %d", len(m.List), StepBytes)
	}
}

func (m *Budget) walk(w *wire) {
	w.begin(TypeBudget, 2)
	num(w, "bytes", &m.Bytes, 0, MaxBudget)
}

// The walks over the fields of messages about transfers between engines.

func (m *Offer) walk(w *wire) {
	w.begin(TypeOffer, 4)
	w.bin("name", &m.Name, 1, MaxTransferName)
	num(w, "tokens", &m.Tokens, 0, math.MaxUint32)
	num(w, "ttl_ms", &m.TTLMS, 1, MaxTransferMS)
}

func (m *Offered) walk(w *wire) {
	w.begin(TypeOffered, 3)
	w.bin("name", &m.Name, 1, MaxTransferName)
	num(w, "tokens", &m.Tokens, 0, math.MaxUint32)
}

func (m *Delivered) walk(w *wire) {
	w.begin(TypeDelivered, 2)
	w.bin("name", &m.Name, 1, MaxTransferName)
}
