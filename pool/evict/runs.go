package evict

// state is what is known of a block: the time of its last use or advice, ms, which wraps after 49
// days and then only ages wrongly; its class, and the class that it has without advice; and the bin
// of age up to which it was counted.
type state struct {
	used        uint32
	class, base uint16
	bin         uint8
}

// node is what is kept of one entry; entry numbers are node numbers, 0 is none.
type node struct {
	print uint64
	links        // in its run
	run   uint32 // 0: the policy does not have the entry
}

// run is a run of entries of one kind and state, such as most blocks of one prompt. They age
// together.
//
//	class c:  newest ── run ── run ── ... ── run ── oldest
//	                    └ first ... last: the entries, the end of the chain first
type run struct {
	links         // in its list
	entries order // the end of the chain is the oldest
	state
	count uint32 // of entries; 0: the run is free, and newer is the next free one
	list  uint16 // the class, or parked
	kind  uint8
}

// parked is the list of the entries that were found in use; it follows those of the classes.
const parked = numClasses

// runs grow with their greatest number so far. Number 0 is none.
type runs struct {
	pages[run]
	made uint32 // numbers given so far
	free uint32 // the first of those given back
}

// alloc returns an unused number.
func (r *runs) alloc() uint32 {
	if id := r.free; id != 0 {
		r.free = r.at(id).newer
		return id
	}
	r.made++
	r.make(r.made)
	return r.made
}

func (r *runs) giveBack(id uint32) {
	r.at(id).newer, r.free = r.free, id
}

// kind are the entries of one kind: for each class a list of runs by use, and over the classes a
// tournament for the oldest run with the least worth, of several the one used least recently.
type kind struct {
	lists   [numClasses + 1]order  // of runs
	least   [numClasses]float32    // worth of the oldest run of a class
	used    [numClasses]uint32     // time of its last use, ms
	winner  [2 * numClasses]uint16 // winner[1] is the class whose least is least
	held    [numClasses]uint32     // entries
	removed [numClasses]uint64     // entries that went
}

func newKind() *kind {
	k := &kind{}
	for c := range numClasses {
		k.winner[numClasses+c] = uint16(c)
		k.least[c] = inf
	}
	for i := numClasses - 1; i > 0; i-- {
		k.winner[i] = k.winner[2*i]
	}
	return k
}

// settle finds the worth of the oldest run of a class again, and replays the games of the class.
func (h *Hazard) settle(k *kind, c uint16) {
	if c == parked {
		return
	}
	worth, used := inf, uint32(0)
	if id := k.lists[c].oldest; id != 0 {
		s := &h.runs.at(id).state
		worth, used = h.worth(s), s.used
	}
	if worth == k.least[c] && used == k.used[c] {
		return
	}
	k.least[c], k.used[c] = worth, used
	for i := (numClasses + int(c)) / 2; i > 0; i /= 2 {
		a, b := k.winner[2*i], k.winner[2*i+1]
		if k.least[b] < k.least[a] || k.least[b] == k.least[a] && int32(k.used[b]-k.used[a]) < 0 {
			a = b
		}
		k.winner[i] = a
	}
}

// worth returns the worth of a block now.
func (h *Hazard) worth(s *state) float32 {
	return h.worths[s.class][max(int(s.bin), binOf(uint32(h.clock.now)-s.used))]
}

// find returns the node of an entry that the policy has; nil otherwise.
func (h *Hazard) find(e uint32) *node {
	if !h.nodes.has(e) {
		return nil
	}
	if n := h.nodes.at(e); n.run != 0 {
		return n
	}
	return nil
}

// match returns the node of an entry if it still has the print; nil otherwise.
func (h *Hazard) match(e uint32, print uint64) *node {
	if n := h.find(e); n != nil && n.print == print {
		return n
	}
	return nil
}

// move makes an entry one of the newest of its new class.
func (h *Hazard) move(e uint32, n *node, s state) {
	kind := h.runs.at(n.run).kind
	h.take(e, n)
	h.put(e, n, kind, s.class, s)
}

// put adds an entry to the newest run of a list if that has its state, or else to a new run.
func (h *Hazard) put(e uint32, n *node, kind uint8, list uint16, s state) {
	runs := &h.kinds[kind].lists[list]
	if id := runs.newest; id == 0 || h.runs.at(id).state != s {
		id = h.runs.alloc()
		*h.runs.at(id) = run{state: s, list: list, kind: kind}
		h.link(id)
	}
	h.join(e, n, runs.newest, h.runs.at(runs.newest).entries.newest)
}

// join inserts an entry into a run, behind an older one; 0: it is the oldest.
func (h *Hazard) join(e uint32, n *node, id, older uint32) {
	r := h.runs.at(id)
	insert(&r.entries, h.nodes, e, older)
	n.run = id
	r.count++
	h.kinds[r.kind].held[r.class]++
}

// take removes an entry from its run.
func (h *Hazard) take(e uint32, n *node) {
	id := n.run
	r := h.runs.at(id)
	h.kinds[r.kind].held[r.class]--
	remove(&r.entries, h.nodes, e)
	n.run = 0
	if r.count--; r.count == 0 {
		h.unlink(id)
		h.runs.giveBack(id)
	}
}

// link makes a run the newest of its list.
func (h *Hazard) link(id uint32) {
	r := h.runs.at(id)
	k := h.kinds[r.kind]
	insert(&k.lists[r.list], h.runs.pages, id, k.lists[r.list].newest)
	h.settle(k, r.list)
}

// unlink removes a run from its list.
func (h *Hazard) unlink(id uint32) {
	r := h.runs.at(id)
	k := h.kinds[r.kind]
	remove(&k.lists[r.list], h.runs.pages, id)
	h.settle(k, r.list)
}
