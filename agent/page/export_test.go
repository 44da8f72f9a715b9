package page

// Backfill makes the page begin with points that were sampled before.
func (p *Page) Backfill(points []Point) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.points, p.made = append(points, p.points...), p.made+uint64(len(points))
}
