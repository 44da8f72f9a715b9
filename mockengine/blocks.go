package mockengine

// BlockID is a block of the engine's KV cache. 0 is the null block: never given, never saved.
type BlockID = uint32

// cacheKey is the key of a block in the prefix cache.
type cacheKey struct {
	group uint8
	hash  Hash
}

// blockPool is the engine's KV cache memory as vLLM manages it: reference counts, a list of free
// blocks in the order of their reuse, and a prefix cache over full blocks. A free block keeps its
// content and can be found until it is reused. Groups share the blocks; a block belongs to one
// group at a time. It is not safe for concurrent use.
type blockPool struct {
	blocks []block
	cached map[cacheKey]BlockID
	free   int // blocks in the free list
}

type block struct {
	refs       int32
	published  bool
	prev, next BlockID // in the free list, which is a ring through block 0
	key        cacheKey
}

// newBlockPool returns n blocks, numbered 1 to n, all free.
func newBlockPool(n int) *blockPool {
	p := &blockPool{blocks: make([]block, n+1), cached: make(map[cacheKey]BlockID)}
	for id := 1; id <= n; id++ {
		p.pushBack(BlockID(id))
	}
	return p
}

// find returns the cached block of a key, without a reference.
func (p *blockPool) find(k cacheKey) (BlockID, bool) {
	id, ok := p.cached[k]
	return id, ok
}

// ref adds a reference, and removes the block from the free list if necessary.
func (p *blockPool) ref(id BlockID) {
	b := &p.blocks[id]
	if b.refs == 0 {
		p.unlink(id)
	}
	b.refs++
}

// unref drops a reference. The last one puts the block at the end of the free list, or, if the
// block has no key, at the front, so that it is reused before cached ones.
func (p *blockPool) unref(id BlockID) {
	b := &p.blocks[id]
	if b.refs <= 0 {
		panic("a block was given back more often than it was taken")
	}
	if b.refs--; b.refs > 0 {
		return
	}
	if b.published {
		p.pushBack(id)
	} else {
		p.pushFront(id)
	}
}

// take returns the block that was free longest, with one reference and without its key.
func (p *blockPool) take() (BlockID, bool) {
	id := p.blocks[0].next
	if id == 0 {
		return 0, false
	}
	p.forget(id)
	p.ref(id)
	return id, true
}

// publish makes a block findable. The first block of a key stays; a second one remains private.
func (p *blockPool) publish(id BlockID, k cacheKey) {
	b := &p.blocks[id]
	if b.published {
		return
	}
	if _, ok := p.cached[k]; ok {
		return
	}
	b.published, b.key = true, k
	p.cached[k] = id
}

func (p *blockPool) forget(id BlockID) {
	if b := &p.blocks[id]; b.published {
		delete(p.cached, b.key)
		b.published = false
	}
}

func (p *blockPool) pushBack(id BlockID)  { p.link(id, p.blocks[0].prev, 0) }
func (p *blockPool) pushFront(id BlockID) { p.link(id, 0, p.blocks[0].next) }

func (p *blockPool) link(id, prev, next BlockID) {
	p.blocks[id].prev, p.blocks[id].next = prev, next
	p.blocks[prev].next, p.blocks[next].prev = id, id
	p.free++
}

func (p *blockPool) unlink(id BlockID) {
	b := &p.blocks[id]
	p.blocks[b.prev].next, p.blocks[b.next].prev = b.next, b.prev
	p.free--
}
