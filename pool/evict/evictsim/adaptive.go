package evictsim

import "container/list"

// lists are lists of blocks, and the one in which each block is.
type lists struct {
	result Result
	in     []*list.List
	at     []*list.Element
}

func newLists(blocks int) lists {
	return lists{in: make([]*list.List, blocks), at: make([]*list.Element, blocks)}
}

// move puts a block in front of a list; nil is none.
func (l *lists) move(b uint32, to *list.List) {
	if from := l.in[b]; from != nil {
		from.Remove(l.at[b])
	}
	if l.in[b] = to; to != nil {
		l.at[b] = to.PushFront(b)
	}
}

func back(l *list.List) uint32 { return l.Back().Value.(uint32) }

// play counts the leading blocks of each request that are stored, and uses the blocks from its
// last.
func (l *lists) play(s *Stream, stored func(b uint32) bool, use func(b uint32)) Result {
	for i := range s.Requests {
		blocks := s.Requests[i].Blocks
		for n := 0; n < len(blocks) && stored(blocks[n]); n++ {
			l.result.Hits++
		}
		l.result.Blocks += len(blocks)
		for j := len(blocks) - 1; j >= 0; j-- {
			use(blocks[j])
		}
	}
	return l.result
}

// ARC returns the result of the adaptive replacement cache of Megiddo and Modha (FAST 2003).
func ARC(s *Stream, capacity int) Result {
	l := newLists(s.Blocks)
	once, often, onceGone, oftenGone := list.New(), list.New(), list.New(), list.New()
	target := 0 // of once
	evict := func(again bool) {
		n := once.Len()
		if n > 0 && (n > target || again && n == target) || often.Len() == 0 {
			l.move(back(once), onceGone)
		} else {
			l.move(back(often), oftenGone)
		}
	}
	stored := func(b uint32) bool { return l.in[b] == once || l.in[b] == often }
	return l.play(s, stored, func(b uint32) {
		to, full := often, once.Len()+often.Len() == capacity
		switch {
		case stored(b):
			full = false
		case l.in[b] == onceGone:
			target = min(capacity, target+max(1, oftenGone.Len()/onceGone.Len()))
		case l.in[b] == oftenGone:
			target = max(0, target-max(1, onceGone.Len()/oftenGone.Len()))
		default:
			to = once
			switch all := once.Len() + onceGone.Len(); {
			case all == capacity && onceGone.Len() > 0:
				l.move(back(onceGone), nil)
			case all == capacity:
				l.move(back(once), nil)
				full = false
			case all+often.Len()+oftenGone.Len() == 2*capacity:
				l.move(back(oftenGone), nil)
			}
		}
		if full {
			evict(l.in[b] == oftenGone)
		}
		l.move(b, to)
	})
}

// S3FIFO returns the result of the three queues of Yang and others (SOSP 2023).
func S3FIFO(s *Stream, capacity int) Result {
	l := newLists(s.Blocks)
	small, main, gone := list.New(), list.New(), list.New()
	uses := make([]uint8, s.Blocks)
	evict := func() {
		for {
			if small.Len() > 0 && (small.Len() > capacity/10 || main.Len() == 0) {
				b := back(small)
				if uses[b] > 1 {
					uses[b] = 0
					l.move(b, main)
					continue
				}
				l.move(b, gone)
				if gone.Len() > capacity {
					l.move(back(gone), nil)
				}
				return
			}
			b := back(main)
			if uses[b] == 0 {
				l.move(b, nil)
				return
			}
			uses[b]--
			l.move(b, main)
		}
	}
	stored := func(b uint32) bool { return l.in[b] == small || l.in[b] == main }
	return l.play(s, stored, func(b uint32) {
		if stored(b) {
			uses[b] = min(3, uses[b]+1)
			return
		}
		to := small
		if l.in[b] == gone {
			to = main
		}
		if small.Len()+main.Len() == capacity {
			evict()
		}
		uses[b] = 0
		l.move(b, to)
	})
}
