package evict

const (
	places     = 6       // awaited blocks of a set
	maxAwaited = 1 << 16 // blocks looked up, not stored before, and not stored yet
)

// awaited are the classes that missing blocks will have when they are stored. The blocks are in
// sets by the hash of their key; each set replaces the oldest.
type awaited struct {
	linear
	pages[awaitedSet]
}

// awaitedSet is one cache line.
type awaitedSet struct {
	print [places]uint64
	class [places]uint16 // and one more; 0 is an empty place
	hand  uint8          // place to be replaced next
}

// find returns the set of a print, and its place there; -1 if there is none.
func (a *awaited) find(print uint64) (*awaitedSet, int) {
	s := a.at(uint32(a.home(print)))
	for i, p := range s.print {
		if p == print && s.class[i] != 0 {
			return s, i
		}
	}
	return s, -1
}

// put records the class of a block, which may be there already.
func (a *awaited) put(print uint64, class uint16) {
	s, i := a.find(print)
	if i < 0 {
		s.put(print, class+1)
		return
	}
	s.class[i] = class + 1
}

func (s *awaitedSet) put(print uint64, mark uint16) {
	s.print[s.hand], s.class[s.hand] = print, mark
	if s.hand++; s.hand == places {
		s.hand = 0
	}
}

// take removes a block and returns its class; ok is false if the block is not there.
func (a *awaited) take(print uint64) (class uint16, ok bool) {
	s, i := a.find(print)
	if i < 0 {
		return 0, false
	}
	class, s.class[i] = s.class[i]-1, 0
	return class, true
}

// grow makes sets for n blocks, at most this many steps at a time.
func (a *awaited) grow(n, steps int) {
	want := uint(max(minSets, n/places))
	for ; a.sets < want && (steps > 0 || a.sets < minSets); steps-- {
		a.make(uint32(a.sets))
		if a.sets < minSets {
			a.sets, a.half = minSets, minSets
			continue
		}
		a.split()
	}
}

// split divides the next set among itself and a new one, each in the order of insertion.
func (a *awaited) split() {
	from, to := a.at(uint32(a.next())), a.at(uint32(a.sets))
	all := *from
	*from = awaitedSet{}
	for i := range places {
		p := (int(all.hand) + i) % places
		if all.class[p] == 0 {
			continue
		}
		half := to
		if a.stays(all.print[p]) {
			half = from
		}
		half.put(all.print[p], all.class[p])
	}
	a.divided()
}
