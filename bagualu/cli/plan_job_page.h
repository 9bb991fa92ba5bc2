#pragma once

#include <string>

#include "bagualu/cli/plan_job.h"
#include "bagualu/cli/plan_page.h"

namespace bagualu {

/// What `bagualu plan --report` shows of a job's plan.
/// Cost:    a few ms: every pass of every rank, 33 loads of every rank.
PlanPage make_job_page(const JobPlanRequest& request, const JobPlanReport& report);

/// plan_page_html() of it.
std::string job_page(const JobPlanRequest& request, const JobPlanReport& report);

}  // namespace bagualu
