package ipc

import "math"

// The walks over the fields of job messages.

func (m *Save) walk(w *wire) {
	w.begin(TypeSave, 7)
	num(w, "job", &m.Job, 0, math.MaxUint64)
	num(w, "epoch", &m.Epoch, 0, math.MaxUint32)
	num(w, "step", &m.Step, 0, math.MaxUint64)
	num(w, "event", &m.Event, 0, math.MaxUint32)
	num(w, "revoke", &m.Revoke, 0, math.MaxUint32)
	walkSections(w, &m.Sections)
}

func (m *Load) walk(w *wire) {
	w.begin(TypeLoad, 7)
	num(w, "job", &m.Job, 0, math.MaxUint64)
	num(w, "epoch", &m.Epoch, 0, math.MaxUint32)
	num(w, "step", &m.Step, 0, math.MaxUint64)
	num(w, "event", &m.Event, 0, math.MaxUint32)
	num(w, "lease", &m.Lease, 0, math.MaxUint64)
	walkSections(w, &m.Sections)
}

func (m *Stages) walk(w *wire) {
	w.begin(TypeStages, 4)
	num(w, "off", &m.Off, 0, math.MaxUint64)
	num(w, "count", &m.Count, 1, MaxStageWords)
	w.bin("stages", &m.List, 2, MaxSegments*2)
	if w.err == nil && len(m.List)%2 != 0 {
		w.fail(ReasonLengths, "stages", "%d bytes, no multiple of 2", len(m.List))
	}
}

func (m *StagedLoad) walk(w *wire) {
	w.begin(TypeStagedLoad, 8)
	num(w, "job", &m.Job, 0, math.MaxUint64)
	num(w, "epoch", &m.Epoch, 0, math.MaxUint32)
	num(w, "step", &m.Step, 0, math.MaxUint64)
	num(w, "event", &m.Event, 0, math.MaxUint32)
	num(w, "lease", &m.Lease, 0, math.MaxUint64)
	num(w, "word", &m.Word, 0, MaxStageWords-1)
	walkSections(w, &m.Sections)
}

func walkSections(w *wire, p *[]Section) {
	list(w, "sections", p, 1, MaxSections, 10)
	blocks := 0
	for i := range *p {
		s := &(*p)[i]
		w.elem("sections", i, 5)
		s.fields(w)
		if w.err != nil {
			return
		}
		blocks += s.Len()
	}
	w.leave()
	if w.err == nil && blocks > MaxJobBlocks {
		w.fail(ReasonRange, "sections", "%d blocks, allowed is 1 to %d", blocks, MaxJobBlocks)
	}
}

func (s *Section) fields(w *wire) {
	num(w, "group", &s.Group, 0, MaxGroups-1)
	w.bin("parent", &s.Parent, 0, MaxHashLen)
	num(w, "hash_len", &s.HashLen, 1, MaxHashLen)
	w.bin("hashes", &s.Hashes, 1, MaxJobBlocks*MaxHashLen)
	w.bin("blocks", &s.Blocks, 4, MaxJobBlocks*4)
	if w.err != nil {
		return
	}
	n := int(s.HashLen)
	if len(s.Parent) != 0 && len(s.Parent) != n {
		w.fail(ReasonLengths, "parent", "%d bytes, allowed is 0 or hash_len %d", len(s.Parent), n)
	}
	if len(s.Hashes)%n != 0 {
		w.fail(ReasonLengths, "hashes", "%d bytes, no multiple of hash_len %d", len(s.Hashes), n)
	}
	if len(s.Blocks) != len(s.Hashes)/n*4 {
		w.fail(ReasonLengths, "blocks", "%d bytes, %d hashes need %d", len(s.Blocks), len(s.Hashes)/n,
			len(s.Hashes)/n*4)
	}
}

// Len returns the number of blocks of a section.
func (s *Section) Len() int { return len(s.Blocks) / 4 }

func (m *Done) walk(w *wire) {
	w.begin(TypeDone, 3)
	num(w, "job", &m.Job, 0, math.MaxUint64)
	w.bin("statuses", &m.Status, 0, MaxJobBlocks)
}
