package transfer

import (
	"fmt"

	"github.com/kvagent/kvagent/pool"
)

// Limits of one job, equal to the session protocol's.
const (
	MaxSections  = 64
	MaxJobBlocks = 8192
)

// checkJobLocked checks a job against the worker's layout and returns its number of blocks.
func (w *Worker) checkJobLocked(job *Job) (blocks int, err error) {
	if job.Kind != Save && job.Kind != Load {
		return 0, fmt.Errorf("kind %d is neither save nor load: %w", job.Kind, ErrInvalid)
	}
	if w.mu.jobs[job.ID] != nil {
		return 0, fmt.Errorf("a job of this number has not ended: %w", ErrInvalid)
	}
	if len(job.Sections) > MaxSections {
		return 0, fmt.Errorf("sections: %d, at most %d: %w", len(job.Sections), MaxSections, ErrInvalid)
	}
	for i := range job.Sections {
		if err := w.checkSection(&job.Sections[i]); err != nil {
			return 0, fmt.Errorf("sections[%d].%w", i, err)
		}
		if blocks += len(job.Sections[i].Blocks); blocks > MaxJobBlocks {
			return 0, fmt.Errorf("sections[%d]: more than %d blocks in all: %w", i, MaxJobBlocks, ErrInvalid)
		}
	}
	if job.Staged != nil {
		if err := job.Staged.check(w, job); err != nil {
			return 0, err
		}
	}
	if job.Kind == Load {
		err = w.checkTwiceLocked(job.Sections)
	}
	return blocks, err
}

func (w *Worker) checkSection(s *Section) error {
	if int(s.Group) >= len(w.bytes) {
		return fmt.Errorf("group: %d is not below %d: %w", s.Group, len(w.bytes), ErrInvalid)
	}
	if len(s.Parent) > pool.MaxHashLen {
		return fmt.Errorf("parent: %d bytes, at most %d: %w", len(s.Parent), pool.MaxHashLen, ErrInvalid)
	}
	if h := &s.Hashes; h.Len < 1 || h.Len > pool.MaxHashLen {
		return fmt.Errorf("hash_len: %d is not within 1 and %d: %w", h.Len, pool.MaxHashLen, ErrInvalid)
	}
	if s.Hashes.N != len(s.Blocks) {
		return fmt.Errorf("blocks: %d for %d hashes: %w", len(s.Blocks), s.Hashes.N, ErrInvalid)
	}
	if !covered(&s.Hashes) {
		return fmt.Errorf("hashes: the view reaches beyond its %d bytes: %w", len(s.Hashes.Blob), ErrInvalid)
	}
	limit := w.held[0].plans[s.Group].blocks
	for i, b := range s.Blocks {
		if b >= limit {
			return fmt.Errorf("blocks[%d]: %d is not below %d: %w", i, b, limit, ErrInvalid)
		}
	}
	return nil
}

// covered reports whether every hash of the view lies in its blob.
func covered(h *pool.Hashes) bool {
	have := len(h.Blob) / h.Len
	if h.N == 0 {
		return true
	}
	if h.N < 0 || h.First < 0 || h.Step < 0 || h.First >= have || h.Step > have {
		return false
	}
	return h.First+(h.N-1)*max(h.Step, 1) < have // N is at most MaxJobBlocks: does not overflow
}

// checkTwiceLocked refuses a load that names one block twice.
func (w *Worker) checkTwiceLocked(sections []Section) (err error) {
	for group := range w.bytes {
		for i := range sections {
			if int(sections[i].Group) != group {
				continue
			}
			for j, b := range sections[i].Blocks {
				word, bit := &w.mu.seen[b/64], uint64(1)<<(b%64)
				if *word&bit != 0 && err == nil {
					err = fmt.Errorf("sections[%d].blocks[%d]: %d is there twice: %w", i, j, b, ErrInvalid)
				}
				*word |= bit
			}
		}
		w.forgetLocked(sections, group)
	}
	return err
}

func (w *Worker) forgetLocked(sections []Section, group int) {
	for i := range sections {
		if int(sections[i].Group) != group {
			continue
		}
		for _, b := range sections[i].Blocks {
			w.mu.seen[b/64] = 0
		}
	}
}
