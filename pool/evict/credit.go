package evict

// A promise of at most 0.01 below LRU can be kept if what LRU would have and the pool has not is never much more than
// what may still be lost: no other block can be a hit of LRU and a miss of the policy.
const (
	giftShare = 0.0045 // blocks given for each block looked up
	giftTrust = 1.5    // blocks that may be missing for each one given ...
	mostTrust = 4      // ... and at most
	leadTrust = 4      // blocks that may be missing for each one that the policy is ahead, at most
	leadTurns = 2      // times the entries that are looked up until a lead counts once more
	patience  = 256    // blocks given that need not have brought a lead
	mostBase  = 512    // blocks given, and of a lead, that count at most ...
	mostShare = 4      // ... and this part of the entries
	debtShare = 4      // part of that up to which losses are remembered that were more than was given
)

// credit is how far the policy may be from LRU. A fresh one does as LRU does; what it wins it may risk.
type credit struct {
	gift   float64 // blocks given, less those lost of them; negative is debt
	lead   float64 // blocks that the policy is ahead of LRU; not negative
	looked float64 // blocks looked up
	looks  float64 // look-ups
}

// book takes a look-up of some blocks in, of which the policy hit so many more than LRU.
func (c *credit) book(ahead, blocks float64, entries int) {
	most := mostBase + float64(entries)/mostShare
	c.gift = min(most, c.gift+giftShare*blocks)
	c.lead = min(most, c.lead+ahead)
	c.looked += blocks
	c.looks++
	if c.lead < 0 {
		c.gift, c.lead = max(-most/debtShare, c.gift+c.lead), 0
	}
}

// missing is the blocks that LRU would have which the policy may have given up.
func (c *credit) missing(entries int) float64 {
	many := c.many()
	turns := c.looked / float64(max(1, entries)) / leadTurns
	lead := 1 + many*(max(1, min(leadTrust, turns))-1)
	gift := giftTrust + min(many, c.worthwhile())*(mostTrust-giftTrust)
	return gift*c.gift + lead*c.lead
}

// many is 1 if what was given is as much as two prompts, less if it is less: where prompts are long, those that are
// missing are of one prompt and are asked for together. Of many prompts not all are asked for before they are back.
func (c *credit) many() float64 {
	return max(0, min(1, c.gift*c.looks/(2*max(1, c.looked))))
}

// worthwhile is 1 if the lead is half of what was given, less if it is less: what is missing for long and brings
// nothing may be what is asked for at last.
func (c *credit) worthwhile() float64 {
	return min(1, (patience/2+c.lead)/max(1, c.gift/2))
}

// bold says whether the policy decides, not LRU.
func (h *Hazard) bold() bool {
	s := &h.shadow
	return h.humble.left == 0 && float64(s.missing)*s.scale() < h.credit.missing(h.entries)
}
