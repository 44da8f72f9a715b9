package ipc

import "math"

const maxFields = 15 // of any message: its array header is one byte

// message is one of the session's messages. walk walks over its fields in both directions.
type message interface{ walk(w *wire) }

// messages are the names and makers of the messages, by number.
var messages = [...]struct {
	name string
	make func() message
}{
	TypeHello:        {"HELLO", func() message { return new(Hello) }},
	TypeWelcome:      {"WELCOME", func() message { return new(Welcome) }},
	TypeRegister:     {"REGISTER", func() message { return new(Register) }},
	TypeRegions:      {"REGIONS", func() message { return new(Regions) }},
	TypeSegments:     {"SEGMENTS", func() message { return new(Segments) }},
	TypeRegistered:   {"REGISTERED", func() message { return new(Registered) }},
	TypeUnregister:   {"UNREGISTER", func() message { return new(Unregister) }},
	TypeRelease:      {"RELEASE", func() message { return new(Release) }},
	TypeSave:         {"SAVE", func() message { return new(Save) }},
	TypeLoad:         {"LOAD", func() message { return new(Load) }},
	TypeCancel:       {"CANCEL", func() message { return new(Cancel) }},
	TypeReset:        {"RESET", func() message { return new(Reset) }},
	TypePing:         {"PING", func() message { return new(Ping) }},
	TypeDone:         {"DONE", func() message { return new(Done) }},
	TypeCancelled:    {"CANCELLED", func() message { return new(Cancelled) }},
	TypePong:         {"PONG", func() message { return new(Pong) }},
	TypeResetDone:    {"RESET_DONE", func() message { return new(ResetDone) }},
	TypeEpoch:        {"EPOCH", func() message { return new(Epoch) }},
	TypeError:        {"ERROR", func() message { return new(Error) }},
	TypeSwitches:     {"SWITCHES", func() message { return new(Switches) }},
	TypeUnregistered: {"UNREGISTERED", func() message { return new(Unregistered) }},
	TypeOffer:        {"OFFER", func() message { return new(Offer) }},
	TypeOffered:      {"OFFERED", func() message { return new(Offered) }},
	TypeDelivered:    {"DELIVERED", func() message { return new(Delivered) }},
	TypeStages:       {"STAGES", func() message { return new(Stages) }},
	TypeStagedLoad:   {"STAGED_LOAD", func() message { return new(StagedLoad) }},
	TypeHint:         {"HINT", func() message { return new(Hint) }},
	TypeSteps:        {"STEPS", func() message { return new(Steps) }},
	TypeBudget:       {"BUDGET", func() message { return new(Budget) }},
	TypeHinted:       {"HINTED", func() message { return new(Hinted) }},
	TypeBlockTokens:  {"BLOCK_TOKENS", func() message { return new(BlockTokens) }},
	TypeNextEvents:   {"NEXT_EVENTS", func() message { return new(NextEvents) }},
	TypeBlockEvents:  {"BLOCK_EVENTS", func() message { return new(BlockEvents) }},
}

// Encode appends msg, a pointer to one of the session's messages, to dst: a frame without its
// length. It refuses what Decode would refuse with a *MalformedError, and then dst is unchanged. It
// only reads msg.
func Encode(dst []byte, version uint32, msg any) ([]byte, error) {
	w := wire{version: version, buf: dst, message: "message"}
	w.checkVersion()
	if m, is := msg.(message); !is {
		w.fail(ReasonVersion, "type", "%T is no message", msg)
	} else if w.err == nil {
		m.walk(&w)
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
	if int(typ) >= len(messages) || messages[typ].make == nil {
		w.fail(ReasonVersion, "type", "%d is no message, allowed is %d to %d", typ, TypeHello, TypeBlockEvents)
		return nil, w.err
	}
	msg := messages[typ].make()
	if w.err == nil {
		msg.walk(&w)
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

func (w *wire) request(typ uint8, req *uint32) {
	w.begin(typ, 2)
	num(w, "req", req, 0, math.MaxUint32)
}

func (w *wire) job(typ uint8, job *uint64) {
	w.begin(typ, 2)
	num(w, "job", job, 0, math.MaxUint64)
}

func (m *Unregister) walk(w *wire) { w.request(TypeUnregister, &m.Req) }
func (m *Reset) walk(w *wire)      { w.request(TypeReset, &m.Req) }
func (m *Ping) walk(w *wire)       { w.request(TypePing, &m.Req) }
func (m *Pong) walk(w *wire)       { w.request(TypePong, &m.Req) }
func (m *Cancel) walk(w *wire)     { w.job(TypeCancel, &m.Job) }
func (m *Cancelled) walk(w *wire)  { w.job(TypeCancelled, &m.Job) }

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
