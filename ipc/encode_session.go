package ipc

import "math"

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
